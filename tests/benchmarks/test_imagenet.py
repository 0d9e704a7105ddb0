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
from checkfreq.examples.imagenet import train as imagenet
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
        (("--chk-freq", "4", "--chk_mode_baseline"), {4, 8, 10}),
    ],
    ids=["chosen", "every 4 updates", "every 4, synchronous"],
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
