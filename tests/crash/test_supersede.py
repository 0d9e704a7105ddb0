"""After restoring an older step: which checkpoints the first commit sets aside, and which not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast
from tests.acceptance.processes import verify_all
from tests.acceptance.programs import Training

pytestmark = [pytest.mark.crash, pytest.mark.more]


def manager_of(training: Training, chk_dir: Path, *, fresh: bool = False) -> CFManager:
    return CFManager(
        chk_dir,
        CFCheckpoint(**training.tracked()),
        mode=CFMode.MANUAL,
        chk_freq=0,
        retention=KeepLast(100),
        fresh=fresh,
        config=CFConfig(nice=0, takeover_s=30.0),
    )


def save_next(training: Training, manager: CFManager) -> None:
    training.update(manager)
    manager.save()
    manager.step()


@pytest.fixture
def chk_dir(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 to 4."""
    training = Training()
    with manager_of(training, tmp_path / "chk") as manager:
        for _ in range(4):
            save_next(training, manager)
    return tmp_path / "chk"


def superseded(chk_dir: Path) -> list[str]:
    folder = chk_dir / "superseded"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_second_commit_after_a_restored_older_step_leaves_the_first_in_place(
    chk_dir: Path, tmp_path: Path, fault_script: Callable[[str], None]
) -> None:
    gate = tmp_path / "both are handed over"
    fault_script(f"commit.mkdir:pause-{gate}")
    training = Training()
    with manager_of(training, chk_dir) as manager:
        manager.restore(1)
        save_next(training, manager)
        save_next(training, manager)
        gate.touch()
        manager.wait()
        assert verify_all(chk_dir) == [1, 2, 3]
    assert superseded(chk_dir) == ["step-00000002", "step-00000003", "step-00000004"]


def test_a_replaced_worker_does_not_supersede_what_the_first_one_committed(
    chk_dir: Path, tmp_path: Path, fault_script: Callable[[str], None]
) -> None:
    gate = tmp_path / "both are handed over"
    fault_script(f"commit.mkdir:pause-{gate};commit.write_manifest:kill-self:2")
    training = Training()
    with manager_of(training, chk_dir) as manager:
        fault_script("")
        manager.restore(1)
        save_next(training, manager)
        save_next(training, manager)
        gate.touch()
        manager.wait()
        assert manager.stats()["num_workers_replaced"] == 1
        assert verify_all(chk_dir) == [1, 2, 3]
    assert superseded(chk_dir) == ["step-00000002", "step-00000003", "step-00000004"]


def test_a_failed_first_commit_leaves_the_supersession_to_the_next(
    chk_dir: Path, fault_script: Callable[[str], None]
) -> None:
    fault_script("commit.rename:raise-EIO")
    training = Training()
    with manager_of(training, chk_dir) as manager:
        manager.restore(1)
        save_next(training, manager)
        manager.wait()
        assert verify_all(chk_dir) == [1, 2, 3, 4]
        save_next(training, manager)
        manager.wait()
        assert verify_all(chk_dir) == [1, 3]
    assert superseded(chk_dir) == ["step-00000002", "step-00000003", "step-00000004"]
