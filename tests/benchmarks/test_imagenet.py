"""The training script: its arms, and the same bits after a forced stop in mid-epoch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("torchvision is not installed", allow_module_level=True)

from benchmarks.make_images import ImageSet, make
from checkfreq.examples.imagenet import options
from checkfreq.examples.imagenet import train as imagenet
from checkfreq.examples.imagenet.images import open_images
from checkfreq.examples.imagenet.models import MODELS, SMALLEST_IMAGE, build, logits_of, loss_of
from checkfreq.examples.imagenet.ranks import Ranks
from iterators import CFIterator, ResumableDataLoader

IMAGES = ImageSet(classes=2, train=9, val=2, smallest=24, largest=40)
STEPS_PER_EPOCH = 5  # of 4 images, the last of 2
EPOCHS = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    make(folder, images=IMAGES)
    return folder


class Script:
    """Runs the script in this process, in a folder of its own."""

    def __init__(self, folder: Path, data: Path) -> None:
        folder.mkdir()
        self.chk_dir, self._report, self._history = folder / "chk", folder / "r", folder / "h"
        self._flags = [
            *("--data", str(data), "-b", "4", "--workers", "0", "--epochs", str(EPOCHS)),
            *("--image-size", "32", "--warmup-epochs", "1.5", "--deterministic", "--quiet"),
            *("--chk-prefix", str(self.chk_dir), "--report", str(self._report)),
            *("--history", str(self._history)),
        ]

    def run(self, *flags: str) -> dict[str, Any]:
        """Train with more flags; returns the report."""
        try:
            imagenet.main([*self._flags, *flags])
        finally:
            torch.use_deterministic_algorithms(False)
        report: dict[str, Any] = json.loads(self._report.read_text())
        return report

    def committed(self) -> set[int]:
        """Steps that became durable, those removed since included."""
        lines = (self.chk_dir / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return {event["step"] for event in events if event["kind"] == "committed"}

    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._history.read_text().splitlines()]


@pytest.fixture
def script(tmp_path: Path, data: Path) -> Script:
    return Script(tmp_path / "script", data)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[str, Any]:
    """The report of a run without a checkpoint."""
    return Script(tmp_path_factory.mktemp("reference") / "run", data).run("--cf_iterator")


RESUMABLE = ("--checkfreq", "--cf_iterator")


@pytest.mark.parametrize(
    ("flags", "certain"),
    [
        ((), {10}),
        (("--chk-freq", "4"), {10}),
        (("--chk-freq", "0"), {10}),
        (("--chk-freq", "4", "--chk_mode_baseline"), {4, 8, 10}),
        (("--chk-freq", "0", "--chk_mode_baseline"), {10}),
    ],
    ids=[
        "chosen",
        "every 4 updates",
        "each epoch",
        "every 4, synchronous",
        "each epoch, synchronous",
    ],
)
def test_every_arm_trains_to_the_same_bits_as_no_checkpoint(
    flags: tuple[str, ...], certain: set[int], script: Script, reference: dict[str, Any]
) -> None:
    report = script.run(*RESUMABLE, *flags)
    assert report["weights"] == reference["weights"]
    assert report["optimizer"] == reference["optimizer"]
    # The others are periodic: one that finds no free slot is taken a boundary later.
    assert certain <= script.committed()
    assert report["checkpoints"]["num_failed"] == 0
    assert report["checkpoints"]["last_durable_step"] == 10


def test_a_forced_stop_in_mid_epoch_resumes_to_the_same_bits(
    script: Script, reference: dict[str, Any]
) -> None:
    for stop in ("3", "4"):
        script.run(*RESUMABLE, "--chk-freq", "2", "--steps-to-run", stop)
    report = script.run(*RESUMABLE, "--chk-freq", "2")
    for part in ("weights", "optimizer", "learning_rate", "best"):
        assert report[part] == reference[part], part
    steps = [line["step"] for line in script.history() if "step" in line]
    assert steps == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    ends = [line for line in script.history() if "exactly_once" in line]
    assert ends == [{"epoch": epoch, "served": 18, "exactly_once": True} for epoch in range(EPOCHS)]


@pytest.mark.dali
def test_dali_with_a_forced_stop_in_mid_epoch_resumes_to_the_same_bits(
    script: Script, tmp_path: Path, data: Path
) -> None:
    calm = Script(tmp_path / "calm", data).run("--dali", "--cf_iterator")
    for stop in ("3", "4"):
        script.run(*RESUMABLE, "--dali", "--chk-freq", "2", "--steps-to-run", stop)
    report = script.run(*RESUMABLE, "--dali", "--chk-freq", "2")
    for part in ("weights", "optimizer", "learning_rate", "best"):
        assert report[part] == calm[part], part
    ends = [line for line in script.history() if "exactly_once" in line]
    assert ends == [{"epoch": epoch, "served": 18, "exactly_once": True} for epoch in range(EPOCHS)]


def test_other_classes_to_validate_on_are_refused(tmp_path: Path) -> None:
    make(tmp_path, images=IMAGES)
    (tmp_path / "val" / "000-stripes").rename(tmp_path / "val" / "other")
    with pytest.raises(FileNotFoundError, match="only one of them has 000-stripes, other"):
        open_images(tmp_path, image_size=32)


@pytest.mark.parametrize("arch", [*MODELS, "resnet34", "vgg11", "googlenet"])
def test_every_model_has_the_classes_asked_for(arch: str) -> None:
    with torch.device("meta"):
        model = build(arch, num_classes=7)
    side = max(64, SMALLEST_IMAGE.get(arch, 0))
    output = model.train()(torch.zeros(2, 3, side, side, device="meta"))
    assert logits_of(output).shape == (2, 7)


def test_loss_of_inception_counts_the_auxiliary_head_at_four_tenths() -> None:
    logits, aux, target = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    criterion = torch.nn.CrossEntropyLoss()
    both = loss_of(criterion, output=(logits, aux), target=target)
    assert torch.equal(both, criterion(logits, target) + 0.4 * criterion(aux, target))


def test_a_launched_rank_has_the_device_of_its_number_on_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    launched = Ranks.launched()
    assert launched == Ranks(rank=5, world=8, local_rank=1)
    assert launched.device("cuda") == torch.device("cuda:1")
    assert launched.device("cuda:3") == torch.device("cuda:3")


def test_the_learning_rate_warms_up_and_then_falls_to_a_tenth_or_along_a_cosine(
    tmp_path: Path,
) -> None:
    for flags, factors in (
        (("--warmup-epochs", "3"), [0.01, 0.505, 0.1, 0.01, 0.001]),
        (("--warmup-epochs", "0", "--lr-schedule", "cosine"), [1.0, 0.933, 0.75, 0.25, 0.0]),
    ):
        args = options.parse(["--data", str(tmp_path), "--epochs", "9", *flags])
        assert [round(imagenet.lr_factor(done, args), 4) for done in (0, 1.5, 3, 6, 9)] == factors


def test_pads_do_not_count_in_the_loss() -> None:
    losses, weights = torch.tensor([3.0, 100.0]), torch.tensor([1.0, 0.0])
    ranks = [
        imagenet.Share(weights, num_samples=3, world=2).mean(losses),
        imagenet.Share(torch.ones(2), num_samples=3, world=2).mean(torch.tensor([1.0, 2.0])),
    ]
    assert float(sum(ranks) / 2) == pytest.approx(2.0)
    assert float(imagenet.Share().mean(torch.tensor([1.0, 2.0]))) == 1.5
    rank = CFIterator(ResumableDataLoader(list(range(3)), 2, rank=3, world=4))
    for _ in rank:
        share = imagenet.Share.of(rank)
    assert share.weights is not None
    assert (share.weights.tolist(), share.num_samples, share.world) == ([0.0], 3, 4)
