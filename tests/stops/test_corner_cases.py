"""Stops at bad times: before there is a checkpoint, on a full disk, on a slow one, on all ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkfreq.store.store import CheckpointStore
from tests.acceptance.disks import Disk, small_disk
from tests.stops.aiming import Case, Instant
from tests.stops.program import BATCH_SIZE, BATCHES, EPOCHS
from tests.stops.stopping import STOPPED, Run, Whole, check, run_whole

pytestmark = pytest.mark.crash

ALONE = Case(world=1, workers=0, to="process")

#: In the midst of the sixth iteration of a life.
SIXTH = Instant("place", 0, "updated", 6, chk_freq=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """One rank's run that nobody stops."""
    return run_whole(tmp_path_factory.mktemp("whole"), ALONE)


def test_a_signal_before_the_first_checkpoint_leads_to_one_and_during_a_restore_costs_nothing(
    whole: Whole, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", ALONE)
    lived = run.live(Instant("place", 0, "updated", 2, chk_freq=1000))
    assert not check(run, lived, whole)
    assert CheckpointStore(run.chk_dir).steps() == [2]
    for wait_s in (0.0, 0.003, 0.03):
        lived = run.live(Instant("start", 0, wait_s=wait_s))
        assert lived.statuses[0] in (-signal.SIGTERM, STOPPED)
        assert not check(run, lived, whole)
    assert check(run, run.live(), whole)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path, num_bytes=16 << 20) as disk:
        yield disk


def test_a_stop_on_a_full_disk_ends_with_1_and_the_run_goes_on_from_the_checkpoint_before(
    whole: Whole, disk: Disk, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", ALONE, disk.mount_point / "chk")
    assert run.live(SIXTH, ballast_bytes=1 << 20).statuses == [STOPPED]
    lived = run.live(SIXTH, meanwhile=disk.fill, ballast_bytes=1 << 20)
    assert lived.statuses == [1], lived.logs
    assert "No space left" in lived.logs
    steps = CheckpointStore(run.chk_dir).steps()
    assert 6 <= steps[-1] < 12
    disk.free()
    lived = run.live(ballast_bytes=1 << 20)
    assert lived.statuses == [0], lived.logs
    (restored,) = (event[1] for event in lived.events[0] if event[0] == "restored")
    assert restored == steps[-1]
    losses = [event for event in lived.events[0] if event[0] == "loss"]
    assert losses == [event for event in whole.history[0] if event[0] == "loss"][restored:]


def test_a_stop_after_the_disk_was_full_is_durable_although_periodic_checkpoints_pause(
    whole: Whole, tmp_path: Path
) -> None:
    """Two attempts fail. The stop's finds room, whether or not the pause was over before it."""
    run = Run(tmp_path / "run", ALONE)
    full = "commit.mkdir:raise-ENOSPC;commit.write:raise-ENOSPC"
    lived = run.live(SIXTH, worker_fault=full)
    assert lived.logs.count("No space left") >= 2
    assert not check(run, lived, whole)
    assert CheckpointStore(run.chk_dir).steps()[-1] == 6
    assert check(run, run.live(), whole)


@pytest.mark.dist
def test_ranks_with_a_deadline_stop_at_one_boundary(tmp_path: Path) -> None:
    case = Case(world=2, workers=0, to="process")
    whole = run_whole(tmp_path / "whole", case)
    run = Run(tmp_path / "run", case)
    lived = run.live(config={"deadline": time.time() - 1.0})
    assert lived.statuses == [STOPPED] * 2, lived.logs
    run.take(lived)
    assert 1 <= run.step < EPOCHS * BATCHES
    assert CheckpointStore(run.chk_dir).steps()[-1] == run.step  # periodic ones may be before it
    assert check(run, run.live(), whole)


@pytest.mark.dist
@pytest.mark.more
def test_ranks_whose_loader_workers_are_killed_go_on_to_the_boundary_at_which_all_stop(
    tmp_path: Path,
) -> None:
    """SLURM signals every process. One rank waits for a batch, the other for its gradients."""
    case = Case(world=2, workers=2, to="everything")
    whole = run_whole(tmp_path / "whole", case)
    run = Run(tmp_path / "run", case)
    # Each of two workers is held in its fifth batch; the rank waits once it has used eight.
    instant = Instant("place", rank=1, where="fetch", hit=5 * BATCH_SIZE, chk_freq=1000)

    def wait_for_the_rank() -> None:
        end_s = time.monotonic() + 60.0
        while (run.folder / "events-1-1").read_text().count('["loss"') < 8:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        time.sleep(0.3)  # it goes from its last loss to the loader

    lived = run.live(instant, meanwhile=wait_for_the_rank)
    assert "starting others" in lived.logs
    assert not check(run, lived, whole), lived.logs
    assert check(run, run.live(), whole)
