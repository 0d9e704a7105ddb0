"""Disks that fill up, fail, turn read-only or slow down while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import checkfreq
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast
from checkfreq.errors import PersistError
from checkfreq.events import FailureNotice
from tests.acceptance.disks import Disk, call, failing_calls, slowed, small_disk
from tests.acceptance.processes import run_to_end, verify_all, worker_pid
from tests.acceptance.programs import Run, Training

pytestmark = pytest.mark.crash


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path) as mounted:
        yield mounted


def manager_of(
    training: Training, chk_dir: Path, *, tolerate_failures: int = 1000, **config: object
) -> CFManager:
    return CFManager(
        chk_dir,
        CFCheckpoint(**training.tracked()),
        mode=CFMode.MANUAL,
        chk_freq=1,
        retention=KeepLast(2),
        tolerate_failures=tolerate_failures,
        config=CFConfig(nice=0, takeover_s=30.0, **config),  # type: ignore[arg-type]
    )


def train(training: Training, manager: CFManager, num_steps: int) -> None:
    """Pass boundaries one at a time; each checkpoint ends before the next begins."""
    for _ in range(num_steps):
        training.update(manager)
        manager.step()
        manager.wait()


def expect_fault_and_recovery(
    chk_dir: Path, begin: Callable[[CFManager], None], end: Callable[[], None], expected: str
) -> None:
    """Two good checkpoints, two during the fault, two after it; then a restore elsewhere."""
    training = Training()
    with manager_of(training, chk_dir) as manager:
        train(training, manager, 2)
        begin(manager)
        try:
            train(training, manager, 2)
            assert manager.global_step == 4
            assert manager.stats()["num_failed"] == 2
            assert manager.stats()["last_durable_step"] == 2
            assert manager.last_event is not None
            assert manager.last_event.kind == "failed"
            assert expected in str(manager.last_event.data["error"])
            assert verify_all(chk_dir) == [1, 2]
        finally:
            end()
        train(training, manager, 2)
        assert manager.stats()["last_durable_step"] == 6
        assert manager.stats()["num_workers_replaced"] == 0
    assert verify_all(chk_dir) == [5, 6]
    again = run_to_end(Run(str(chk_dir), num_steps=6))
    assert again.restored == (6, training.digest())


def test_a_disk_that_fills_up_fails_checkpoints_until_there_is_room_again(disk: Disk) -> None:
    expect_fault_and_recovery(
        disk.mount_point / "chk", lambda manager: disk.fill(), disk.free, "No space left"
    )


def test_a_disk_that_stays_full_ends_no_run_and_checkpoints_go_on_once_there_is_room(
    disk: Disk,
) -> None:
    """With default settings: many failures in a row, then there is space again."""
    chk_dir = disk.mount_point / "chk"
    training = Training()
    told: list[FailureNotice] = []
    with CFManager(
        chk_dir,
        CFCheckpoint(**training.tracked()),
        max_overhead=0.5,
        config=CFConfig(nice=0, on_failure=told.append),
    ) as manager:
        manager.restore()
        train_until(training, manager, lambda: manager.stats()["num_committed"] >= 3)
        disk.fill()
        train_until(training, manager, lambda: len(told) >= 4)
        durable = manager.stats()["last_durable_step"]
        assert not any(notice.is_over for notice in told)
        assert {notice.durable_step for notice in told} == {durable}
        assert told[-1].steps_at_risk > told[0].steps_at_risk
        assert told[-1].retry_in_s > 1.0
        disk.free()
        train_until(training, manager, lambda: told[-1].is_over)
        assert manager.stats()["last_durable_step"] > durable
    assert verify_all(chk_dir)[-1] == manager.global_step
    again = Training()
    with manager_of(again, chk_dir) as manager:
        assert manager.restore()
        assert again.digest() == training.digest()


def train_until(training: Training, manager: CFManager, condition: Callable[[], bool]) -> None:
    """Pass boundaries without waiting for checkpoints, until ``condition()``."""
    while not condition():
        training.update(manager)
        manager.step()


def test_a_full_disk_is_reported_with_needed_and_free_bytes(disk: Disk) -> None:
    training = Training()
    with (
        pytest.raises(PersistError, match=r"needs \d+ bytes, \d+ are free") as caught,
        manager_of(training, disk.mount_point / "chk", tolerate_failures=0) as manager,
    ):
        train(training, manager, 1)
        disk.fill()
        train(training, manager, 1)
    assert caught.value.step == 2
    assert caught.value.phase == "begin"
    assert "OSError" in caught.value.child_traceback
    assert verify_all(disk.mount_point / "chk") == [1]


@pytest.mark.parametrize("tolerate_failures", [0, 2])
def test_training_ends_when_more_failures_in_a_row_than_tolerated(
    disk: Disk, tolerate_failures: int
) -> None:
    training = Training()
    with (
        pytest.raises(PersistError) as caught,
        manager_of(
            training, disk.mount_point / "chk", tolerate_failures=tolerate_failures
        ) as manager,
    ):
        for _ in range(2):  # a success in between: counting starts anew
            train(training, manager, 1)
            disk.fill()
            train(training, manager, tolerate_failures)
            disk.free()
        train(training, manager, 1)
        disk.fill()
        train(training, manager, tolerate_failures + 1)
    assert manager.stats()["num_failed"] == 3 * tolerate_failures + 1
    assert "Persist worker's traceback" in str(caught.value)
    assert verify_all(disk.mount_point / "chk")


def test_closing_on_a_full_disk_raises_and_keeps_the_old_checkpoint(disk: Disk) -> None:
    training = Training()
    manager = manager_of(training, disk.mount_point / "chk")
    train(training, manager, 1)
    disk.fill()
    train(training, manager, 1)

    with pytest.raises(PersistError, match="No space left"):
        manager.close()

    assert verify_all(disk.mount_point / "chk") == [1]


def test_a_run_restores_from_a_full_disk_and_trains_on(disk: Disk) -> None:
    chk_dir = disk.mount_point / "chk"
    training = Training()
    with manager_of(training, chk_dir) as manager:
        train(training, manager, 2)
    disk.fill()
    again = Training()
    with manager_of(again, chk_dir) as manager:
        assert manager.restore()
        assert (manager.global_step, again.digest()) == (2, training.digest())
        train(again, manager, 2)
        disk.free()
    assert verify_all(chk_dir) == [2, 4]


@pytest.mark.parametrize(
    ("call_name", "error", "expected"),
    [
        ("pwrite64", "EIO", "Input/output error"),
        ("pwrite64", "ENOSPC", "No space left"),
        ("fdatasync", "EIO", "Input/output error"),
        ("fsync", "EIO", "Input/output error"),
        ("renameat", "EIO", "Input/output error"),
        ("mkdirat", "EROFS", "Read-only file system"),
    ],
)
def test_failing_system_calls_of_the_worker_fail_checkpoints_until_they_work_again(
    call_name: str, error: str, expected: str, tmp_path: Path
) -> None:
    faults = []

    def begin(manager: CFManager) -> None:
        faults.append(failing_calls(worker_pid(tmp_path / "chk"), call_name, error))
        faults[0].__enter__()

    expect_fault_and_recovery(
        tmp_path / "chk", begin, lambda: faults[0].__exit__(None, None, None), expected
    )


def test_a_step_whose_last_sync_failed_is_removed_by_retention_all_the_same(
    tmp_path: Path,
) -> None:
    """Its rename came before the sync that failed, so it is there but not acknowledged."""
    training = Training()
    with manager_of(training, tmp_path / "chk") as manager:
        train(training, manager, 1)
        # Of the fsyncs of a commit the third is that of the parent: manifest, folder, parent.
        with failing_calls(worker_pid(tmp_path / "chk"), "fsync", "EIO", which="3"):
            train(training, manager, 1)
        assert manager.stats()["num_failed"] == 1
        assert manager.all_steps() == [1, 2]
        train(training, manager, 3)
    assert verify_all(tmp_path / "chk") == [4, 5]


def test_a_read_only_remount_fails_checkpoints_until_it_is_undone(
    disk: Disk, tmp_path: Path
) -> None:
    chk_dir = disk.mount_point / "chk"
    chk_dir.mkdir()
    # A file open for writing keeps a disk from being remounted, so the lock lies elsewhere.
    for lock in (tmp_path / "lock", chk_dir / ".lock"):
        lock.touch()
    call("mount", "--bind", str(tmp_path / "lock"), str(chk_dir / ".lock"))
    try:
        expect_fault_and_recovery(
            chk_dir,
            lambda manager: disk.remount("ro"),
            lambda: disk.remount("rw"),
            "Read-only file system",
        )
    finally:
        call("umount", str(chk_dir / ".lock"))


def test_a_file_system_that_breaks_down_keeps_the_old_checkpoint_readable(disk: Disk) -> None:
    training = Training()
    with (
        pytest.raises(PersistError, match="Read-only file system"),
        manager_of(training, disk.mount_point / "chk", tolerate_failures=2) as manager,
    ):
        train(training, manager, 2)
        weight = training.model[0].weight.detach().clone()
        disk.break_down()
        train(training, manager, 2)
        assert verify_all(disk.mount_point / "chk") == [1, 2]
        loaded = checkfreq.load(disk.mount_point / "chk")
        assert torch.equal(loaded["model"]["0.weight"], weight)
        train(training, manager, 1)


def test_a_slow_disk_defers_checkpoints_and_training_goes_on(disk: Disk) -> None:
    chk_dir = disk.mount_point / "chk"
    training = Training()
    training.extra["ballast"] = torch.zeros(1 << 20)  # 4 MiB: 0.2 s at 20 MB/s
    with manager_of(training, chk_dir, write_chunk_bytes=1 << 20) as manager:
        manager.restore()  # the worker is up from here on
        with slowed(disk, worker_pid(chk_dir), bytes_per_s=20_000_000):
            while manager.stats()["num_committed"] < 3:
                training.extra["ballast"] += 1.0
                training.update(manager)
                manager.step()
            assert manager.stats()["num_deferred"] > 0
            assert manager.stats()["num_failed"] == 0
    assert verify_all(chk_dir)[-1] == manager.global_step
