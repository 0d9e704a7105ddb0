"""The training script on several ranks, under both launchers, and after a rank was killed.

Three, since with two the order in which DDP adds up gradients makes no difference.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("torchvision is not installed", allow_module_level=True)

from benchmarks.make_images import ImageSet, make
from tests.benchmarks.launching import LAUNCH, TORCHRUN, Launch, Running

pytestmark = [pytest.mark.dist, pytest.mark.slow]

IMAGES = ImageSet(classes=2, train=12, val=3, smallest=24, largest=40)
EPOCHS, STEPS = 4, 16
CHECKFREQ = ("--checkfreq", "--chk-freq", "2", "--split-replicated", "--barrier")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Three ranks of two images each have four updates per epoch."""
    folder = tmp_path_factory.mktemp("images")
    make(folder, images=IMAGES)
    return (
        *("--data", str(folder), "-b", "2", "--workers", "0", "--epochs", str(EPOCHS)),
        *("--image-size", "32", "--warmup-epochs", "1.5", "--deterministic", "--quiet"),
        *("--cf_iterator", "--print-freq", "4"),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, flags: tuple[str, ...]) -> dict[str, Any]:
    """The report of a run without a checkpoint, under the older launcher."""
    return Launch(tmp_path_factory.mktemp("undisturbed"), flags, launcher=LAUNCH).run()


@pytest.mark.crash
def test_a_killed_rank_is_restarted_a_stopped_run_goes_on_and_nothing_is_lost(
    tmp_path: Path, flags: tuple[str, ...], undisturbed: dict[str, Any]
) -> None:
    """Rank 0 keeps the store in which ranks meet: without it the others end at once.

    Of two restarts one is left when the ranks stop, and it is not used.
    """
    launch = Launch(tmp_path, flags, launcher=(*TORCHRUN, "--max-restarts", "2"))
    marker = tmp_path / "chk.stopped"
    with launch.started(*CHECKFREQ) as running:
        running.wait_for_step(5)
        running.kill(rank=0)
        running.wait_for_step(8)
        assert not marker.exists()
        running.stop_ranks()
        assert running.returncode() == 0, launch.log()
    assert marker.exists()
    with launch.started(*CHECKFREQ) as again:
        assert again.returncode() == 0, launch.log()
    assert not marker.exists()
    for part in ("weights", "optimizer", "learning_rate", "best"):
        assert launch.report()[part] == undisturbed[part], part
    stopped_at = launch.report()["checkpoints"]["restored_step"]
    assert steps(running)[-1] == stopped_at
    assert steps(again) == list(range(stopped_at + 1, STEPS + 1))
    ends = [line for line in running.history + again.history if "exactly_once" in line]
    assert {line["epoch"] for line in ends} >= {0, EPOCHS - 1}
    assert all(line["exactly_once"] and line["served"] == 24 for line in ends), ends


def steps(running: Running) -> list[int]:
    """The updates that the first rank noted."""
    return [line["step"] for line in running.history if "step" in line]
