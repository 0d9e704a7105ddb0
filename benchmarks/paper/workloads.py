"""The workloads of `benchmarks.paper`: the paper's models in the paper's sizes, or sized for a CPU.

The paper's are ImageNet shapes at 256 images per GPU (128 for the two largest networks), in mixed
precision. For a CPU they are so small that an iteration takes 50 to 400 ms on one core. The
networks are the same, except that the language models are smaller and that Inception has no
auxiliary head, which needs larger images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.lab.language import LANGUAGE_MODELS
from benchmarks.lab.training import Batch, Loop
from checkfreq.examples.imagenet.models import MODELS as IMAGE_MODELS

#: Training images of ImageNet-1k, and tokens of WikiText-103: what an epoch is on a GPU.
IMAGENET_IMAGES = 1_281_167
WIKITEXT_TOKENS = 103_227_021
#: An epoch on a CPU, in iterations.
SHORT_EPOCH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model with its batch: ``image_size`` pixels, or ``tokens`` per sequence."""

    model: str
    batch: int
    image_size: int = 32
    tokens: int = 32
    device: str = "cpu"
    amp: bool = False
    small: bool = True
    epoch: str = f"{SHORT_EPOCH:,} iterations"
    epoch_iterations: int = SHORT_EPOCH

    @property
    def is_language(self) -> bool:
        """Whether its input is tokens."""
        return self.model in LANGUAGE_MODELS

    @property
    def kind(self) -> str:
        """The kind of device, without its number."""
        return self.device.partition(":")[0]

    @property
    def is_target(self) -> bool:
        """Whether the GPU target applies: ResNet-50 as the paper trained it."""
        sizes = self.model, self.batch, self.image_size
        return sizes == ("resnet50", 256, 224) and self.kind == "cuda" and self.amp

    @property
    def packages(self) -> tuple[str, ...]:
        """The package that provides the model."""
        return ("transformers",) if self.is_language else ("torchvision",)

    def loop(
        self, *, seed: int, source: Iterator[Batch] | None = None, num_classes: int | None = None
    ) -> Loop:
        """The loop, ready to start; with ImageNet's number of classes by default."""
        return Loop(
            self.model,
            batch=self.batch,
            image_size=self.image_size,
            tokens=self.tokens,
            seed=seed,
            device=self.device,
            amp=self.amp,
            small=self.small,
            source=source,
            num_classes=num_classes or 1000,
        )


def on_cpu() -> dict[str, Workload]:
    """By name, in the paper's order."""
    batches = {"resnet18": 8, "resnet50": 8, "resnext101": 2, "densenet121": 8, "vgg16": 2}
    images = [Workload(model=name, batch=batch) for name, batch in batches.items()]
    inception = Workload(model="inception_v3", batch=4, image_size=75)
    texts = [Workload(model=name, batch=8) for name in ("bert", "gpt2")]
    return {each.model: each for each in (*images, inception, *texts)}


def on_gpu() -> dict[str, Workload]:
    """The paper's own, and GPT-2 with 1.5 billion parameters, which is only trained if named."""
    images = [_imagenet(name) for name in IMAGE_MODELS]
    texts = [
        _wikitext("bert", batch=32, tokens=512),
        _wikitext("gpt2", batch=16, tokens=1024),
        _wikitext("gpt2-xl", batch=8, tokens=1024),
    ]
    return {each.model: each for each in (*images, *texts)}


def _imagenet(model: str) -> Workload:
    batch = 128 if model in ("resnext101", "densenet121") else 256
    return Workload(
        model=model,
        batch=batch,
        image_size=299 if model == "inception_v3" else 224,
        device="cuda",
        amp=True,
        epoch="ImageNet-1k",
        epoch_iterations=-(-IMAGENET_IMAGES // batch),
    )


def _wikitext(model: str, *, batch: int, tokens: int) -> Workload:
    return Workload(
        model=model,
        batch=batch,
        tokens=tokens,
        device="cuda",
        amp=True,
        small=False,
        epoch="WikiText-103",
        epoch_iterations=-(-WIKITEXT_TOKENS // (batch * tokens)),
    )
