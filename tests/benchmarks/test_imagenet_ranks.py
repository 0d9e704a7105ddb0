"""The training script on several ranks, under both launchers, and after a rank was killed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("torchvision is not installed", allow_module_level=True)

from benchmarks.make_images import ImageSet, make
from tests.benchmarks.launching import LAUNCH, TORCHRUN, Launch

pytestmark = pytest.mark.dist

IMAGES = ImageSet(classes=2, train=12, val=3, smallest=24, largest=40)
RANKS, BATCH, EPOCHS = 2, 3, 3
STEPS_PER_EPOCH = 4
STEPS = STEPS_PER_EPOCH * EPOCHS
CHECKFREQ = ("--checkfreq", "--chk-freq", "2")
ENDS = [{"epoch": epoch, "served": 24, "exactly_once": True} for epoch in range(EPOCHS)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("images")
    make(folder, images=IMAGES)
    return (
        *("--data", str(folder), "-b", str(BATCH), "--workers", "0", "--epochs", str(EPOCHS)),
        *("--image-size", "32", "--warmup-epochs", "1.5", "--deterministic", "--quiet"),
        *("--cf_iterator", "--print-freq", "4"),
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, flags: tuple[str, ...]) -> dict[str, Any]:
    """The report of a run without a checkpoint."""
    return Launch(tmp_path_factory.mktemp("reference"), flags).run()


def require_same(report: dict[str, Any], reference: dict[str, Any]) -> None:
    for part in ("weights", "optimizer", "learning_rate", "best"):
        assert report[part] == reference[part], part


def test_the_older_launcher_trains_and_resumes_to_the_same_bits(
    tmp_path: Path, flags: tuple[str, ...], reference: dict[str, Any]
) -> None:
    launch = Launch(tmp_path, flags, launcher=LAUNCH)
    launch.run(*CHECKFREQ, "--steps-to-run", "5")
    report = launch.run(*CHECKFREQ, "--split-replicated", "--barrier")
    require_same(report, reference)
    assert report["checkpoints"]["restored_step"] == 5


@pytest.mark.crash
def test_a_killed_rank_is_restarted_and_nothing_is_lost(
    tmp_path: Path, flags: tuple[str, ...], reference: dict[str, Any]
) -> None:
    launch = Launch(tmp_path, flags, launcher=(*TORCHRUN, "--max-restarts", "1"))
    with launch.started(*CHECKFREQ) as running:
        running.wait_for_step(7)
        running.kill(rank=1)
        running.finish()
    require_same(launch.report(), reference)
    restored = launch.report()["checkpoints"]["restored_step"]
    assert restored >= 2
    steps = [line["step"] for line in running.history if "step" in line]
    assert steps[restored - STEPS :] == list(range(restored + 1, STEPS + 1))
    assert steps[: restored - STEPS] == list(range(1, len(steps) - STEPS + restored + 1))
    ends = [line for line in running.history if "exactly_once" in line]
    assert ends[-EPOCHS:] == ENDS
