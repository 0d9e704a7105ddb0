"""Training loops for measuring overhead: image classifiers and language models, on any device.

The precision gained per second of measuring does not depend on the length of an iteration, but with
shorter iterations there are more checkpoints in that second. So images and language models are
small on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.lab.language import LANGUAGE_MODELS, Language
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast
from checkfreq.examples.imagenet.models import MODELS as IMAGE_MODELS
from checkfreq.examples.imagenet.models import SMALLEST_IMAGE, build, loss_of
from checkfreq.types import SnapshotPlace

MODELS = (*IMAGE_MODELS, "transformer", *LANGUAGE_MODELS)

Batch = tuple[torch.Tensor, torch.Tensor]

_CLASSES = 10
_BATCHES = 16  # made once; training takes them in turn


def add_loop_options(parser: argparse.ArgumentParser) -> None:
    """Options for the workload and the number of threads."""
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="of a sequence")
    parser.add_argument("--amp", action="store_true", help="bfloat16 where autocast uses it")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    add_device_option(parser)


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """The option for the device to train on."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="default here: %(default)s")


class Decoder(nn.Module):
    """A causal transformer of 9 million parameters; int64 tokens [N, L] to logits [N, L, V]."""

    VOCABULARY = 8192

    def __init__(self, *, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, self.VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the token after each."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.layers(self.embedding(tokens), mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Loop:
    """Trains one of `MODELS`; runs with the same seed and device are identical.

    Batches are random and created once, or come from ``source``, images of ``num_classes`` classes.
    ``amp``: bfloat16 where autocast uses it, on any device (its range needs no loss scaler).
    ``small``: a language model sized for a CPU. On CUDA, images are stored channels last.
    """

    def __init__(
        self,
        name: str,
        *,
        batch: int,
        image_size: int = 32,
        tokens: int = 32,
        seed: int = 0,
        device: str | torch.device = "cpu",
        amp: bool = False,
        small: bool = True,
        source: Iterator[Batch] | None = None,
        num_classes: int = _CLASSES,
    ) -> None:
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self._amp = amp
        self._format = torch.preserve_format
        if name in IMAGE_MODELS and self.device.type == "cuda":
            self._format = torch.channels_last
        with self.device:
            if name in IMAGE_MODELS:
                made, draw = _image_model(name, batch, image_size, num_classes)
            else:
                made, draw = _language_model(name, batch, tokens, small=small)
            self.model = made.to(memory_format=self._format)
            self.optimizer = _optimizer(name, self.model)
            drawn = (draw() for _ in range(_BATCHES))
            self._batches = source or itertools.cycle([self._placed(each) for each in drawn])
        self._criterion = nn.CrossEntropyLoss()

    @classmethod
    def of(cls, args: argparse.Namespace, *, seed: int) -> Loop:
        """From the options of `add_loop_options`."""
        return cls(
            args.model,
            batch=args.batch,
            image_size=args.image_size,
            tokens=args.tokens,
            seed=seed,
            device=args.device,
            amp=args.amp,
        )

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the model."""
        return sum(each.numel() for each in self.model.parameters())

    def iterate(self) -> None:
        """One batch: forward, backward, update."""
        inputs, target = self._placed(next(self._batches))
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._amp):
            output = self.model(inputs)
            if isinstance(output, torch.Tensor):
                output = output.flatten(end_dim=-2)
            loss = loss_of(self._criterion, output=output, target=target)
        loss.backward()
        self.optimizer.step()

    def _placed(self, batch: Batch) -> Batch:
        """A batch on the device, in the model's memory format, without a copy if it is there."""
        inputs, target = batch
        return (
            inputs.to(self.device, non_blocking=True, memory_format=self._format),
            target.to(self.device, non_blocking=True),
        )

    def synchronize(self) -> None:
        """Wait for the device; to be called before a clock is read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def manager(
        self,
        folder: Path,
        *,
        interval: int | None = None,
        max_overhead: float = 0.035,
        dynamic: bool = True,
        place: SnapshotPlace | None = None,
    ) -> CFManager:
        """A manager of this loop: AUTO, or MANUAL with an ``interval``. It catches no signals.

        ``place`` of the snapshots; None: chosen by cost in AUTO, the host in MANUAL.
        """
        return CFManager(
            folder,
            CFCheckpoint(model=self.model, optimizer=self.optimizer),
            mode=CFMode.AUTO if interval is None else CFMode.MANUAL,
            chk_freq=interval,
            max_overhead=max_overhead,
            dynamic=dynamic,
            retention=KeepLast(1),
            config=CFConfig(stop_signals=(), snapshot_place=place),
        )


def _image_model(
    name: str, batch: int, image_size: int, num_classes: int
) -> tuple[nn.Module, Callable[[], Batch]]:
    """The model, and a function that draws a batch for it."""
    aux = image_size >= SMALLEST_IMAGE.get(name, 0)
    shape = (batch, 3, image_size, image_size)
    return build(name, num_classes=num_classes, aux=aux), partial(_images, shape, num_classes)


def _language_model(
    name: str, batch: int, tokens: int, *, small: bool
) -> tuple[nn.Module, Callable[[], Batch]]:
    """The model, and a function that draws a batch for it."""
    if name == "transformer":
        return Decoder(), partial(_sequences, batch, tokens)
    made = Language(name, small=small)
    return made, partial(made.batch, batch, tokens)


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The usual optimizer for each kind of model."""
    if name in IMAGE_MODELS:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _images(shape: tuple[int, ...], num_classes: int) -> Batch:
    return torch.randn(shape), torch.randint(0, num_classes, shape[:1])


def _sequences(batch: int, tokens: int) -> Batch:
    drawn = torch.randint(0, Decoder.VOCABULARY, (batch, tokens + 1))
    return drawn[:, :-1], drawn[:, 1:].flatten()
