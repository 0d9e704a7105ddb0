"""The lock on a directory: one holder, which waiting processes are told of."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from checkfreq.errors import ForeignEntryError, StorageError
from checkfreq.persist.lock import DirectoryLock, LockState, LockTimeoutError, holder_of
from checkfreq.store.mounts import mount_of
from tests.users import another_effective_user, as_another_user, public_folder

DEADLINE_S = 120.0


def acquire(
    lock: DirectoryLock,
    *,
    timeout_s: float = 0.0,
    on_wait: Callable[[str], None] = lambda holder: None,
    give_up: Callable[[float], bool] = lambda seconds: False,
) -> None:
    lock.acquire(timeout_s=timeout_s, owner_pid=4711, on_wait=on_wait, give_up=give_up)


def test_it_is_held_until_released(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    assert not lock.is_held()
    acquire(lock)
    assert lock.is_held()
    assert lock._fd is not None
    assert not os.get_inheritable(lock._fd)
    lock.release()
    lock.release()
    assert not lock.is_held()


def test_a_copy_of_the_descriptor_in_a_forked_process_does_not_keep_it(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    acquire(first)
    assert first._fd is not None
    copy = os.dup(first._fd)  # what a fork makes
    first.release()
    acquire(second)
    second.release()
    os.close(copy)


def test_a_second_one_is_refused_and_the_holder_is_named(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    acquire(first)
    with pytest.raises(LockTimeoutError) as caught:
        acquire(second)
    assert f"persist worker {os.getpid()} of training process 4711" in caught.value.holder
    assert "still locked by" in str(caught.value)
    assert not second.is_held()
    first.release()


def test_a_successor_waits_and_says_so_once(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    acquire(first)
    waits: list[str] = []
    tries: list[float] = []

    def give_up(seconds: float) -> bool:
        tries.append(seconds)
        if len(tries) == 3:
            first.release()
        return False

    acquire(second, timeout_s=60.0, on_wait=waits.append, give_up=give_up)
    assert second.is_held()
    assert len(tries) == 3
    assert len(waits) == 1
    second.release()


def test_a_holder_that_cannot_be_read_is_another_process(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    acquire(first)
    for text in ("", "[]", json.dumps({"host": "x"})):
        (tmp_path / ".lock").write_text(text)
        with pytest.raises(LockTimeoutError, match="another process"):
            acquire(second)
    first.release()


def test_a_holder_that_ended_is_not_named(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait(DEADLINE_S)
    first = DirectoryLock(tmp_path)
    acquire(first)
    record = json.loads((tmp_path / ".lock").read_text())
    (tmp_path / ".lock").write_text(json.dumps({**record, "worker_pid": ended.pid}))
    with pytest.raises(LockTimeoutError, match=r"another process \(`fuser -v .*lock` shows it"):
        acquire(DirectoryLock(tmp_path))
    first.release()


def test_another_user_who_may_read_the_directory_cannot_hold_its_lock() -> None:
    with public_folder(0o777) as folder:
        acquire(lock := DirectoryLock(folder))
        lock.release()
        done = as_another_user("flock", "--exclusive", str(folder / ".lock"), "echo", "locked")
        assert "Permission denied" in done.stderr
        assert done.stdout == ""
        with another_effective_user(), pytest.raises(StorageError) as caught:
            acquire(DirectoryLock(folder))
    assert caught.value.errno == errno.EACCES
    assert "only its owner may lock it" in str(caught.value)
    assert "Copy the directory (cp -r)" in str(caught.value)


def hard_linked(folder: Path, copy: Path) -> Path:
    subprocess.run(["cp", "-al", str(folder), str(copy)], check=True, timeout=DEADLINE_S)
    return copy


def test_a_copy_by_hard_links_is_locked_apart_whoever_owns_the_first(
    tmp_path: Path,
) -> None:
    chk_dir = tmp_path / "chk"
    chk_dir.mkdir()
    first = DirectoryLock(chk_dir)
    acquire(first)
    backup = hard_linked(chk_dir, tmp_path / "backup")
    assert holder_of(chk_dir) == 4711
    assert holder_of(backup) is None
    second, third = DirectoryLock(backup), DirectoryLock(chk_dir)
    acquire(second)
    assert first.is_held()
    assert second.is_held()
    with pytest.raises(LockTimeoutError):
        acquire(third)
    assert os.listdir(backup) == [".lock"]
    second.release()
    backup = hard_linked(chk_dir, tmp_path / "another")
    before = (backup / ".lock").read_bytes()
    (chk_dir / ".lock.new").touch()  # left by a crash
    first.note_owner(4712)
    assert first.is_held()
    assert holder_of(chk_dir) == 4712
    assert (backup / ".lock").read_bytes() == before
    first.release()


def test_a_lock_file_that_cannot_be_made_anew_leaves_no_descriptor_open(tmp_path: Path) -> None:
    refused = [False]

    def flock(fd: int, operation: int) -> None:
        if refused[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fcntl.flock(fd, operation)

    lock = DirectoryLock(tmp_path, flock=flock)
    acquire(lock)
    os.link(tmp_path / ".lock", tmp_path / "other")
    before = os.listdir("/proc/self/fd")
    refused[0] = True
    with pytest.raises(OSError, match="Input/output error"):
        lock.note_owner(4712)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    refused[0] = False
    assert lock.is_held()
    lock.release()


def test_a_file_replaced_between_opening_and_locking_is_not_taken(tmp_path: Path) -> None:
    replacements = [tmp_path / ".lock"]

    def replace_then_lock(fd: int, operation: int) -> None:
        while replacements:
            path = replacements.pop()
            path.unlink()
            path.touch()
        fcntl.flock(fd, operation)

    lock = DirectoryLock(tmp_path, flock=replace_then_lock)
    acquire(lock, timeout_s=60.0)
    assert not replacements
    assert lock.is_held()
    lock.release()


def test_a_file_system_without_locks_is_named_and_what_to_do(tmp_path: Path) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    mount = mount_of(tmp_path)
    assert mount is not None
    lock = DirectoryLock(tmp_path, flock=flock)
    with pytest.raises(StorageError) as caught:
        acquire(lock)
    assert os.strerror(errno.ENOLCK) in str(caught.value)
    assert f"({mount.fs_type}, mounted at {mount.mount_point})" in str(caught.value)
    assert "put the directory on another file system" in str(caught.value)
    assert not lock.is_held()


def test_its_state_says_why_it_is_no_longer_held(tmp_path: Path) -> None:
    chk_dir = tmp_path / "chk"
    chk_dir.mkdir()
    lock = DirectoryLock(chk_dir)
    acquire(lock)
    assert lock.state() is LockState.HELD
    (chk_dir / ".lock").unlink()
    assert lock.state() is LockState.UNLOCKED
    (chk_dir / ".lock").touch()
    assert lock.state() is LockState.UNLOCKED
    chk_dir.rename(tmp_path / "moved")
    assert lock.state() is LockState.GONE
    chk_dir.mkdir()
    assert lock.state() is LockState.REPLACED
    acquire(lock)
    assert lock.state() is LockState.REPLACED
    lock.remember_directory()
    assert lock.state() is LockState.HELD
    lock.release()


@pytest.mark.parametrize("plant", ["link", "fifo"])
def test_a_link_or_a_fifo_is_not_locked(plant: str, tmp_path: Path) -> None:
    target = tmp_path / "bashrc"
    target.write_text("mine")
    chk_dir = tmp_path / "chk"
    chk_dir.mkdir()
    if plant == "link":
        (chk_dir / ".lock").symlink_to(target)
    else:
        os.mkfifo(chk_dir / ".lock")
    with pytest.raises(ForeignEntryError, match=r"\.lock"):
        acquire(DirectoryLock(chk_dir))
    assert target.read_text() == "mine"


@pytest.fixture
def locked_by_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DirectoryLock:
    """By the first of two tasks of a SLURM job."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"JOB_ID": "7", "STEP_ID": "0", "NTASKS": "2", "PROCID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    acquire(first := DirectoryLock(tmp_path))
    return first


def test_another_task_of_the_same_step_is_not_waited_for_and_told_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked_by_a_task: DirectoryLock
) -> None:
    second = DirectoryLock(tmp_path)
    monkeypatch.setenv("SLURM_PROCID", "1")
    with pytest.raises(LockTimeoutError) as caught:
        acquire(second, timeout_s=3600.0)
    assert caught.value.is_sibling
    assert (
        "(SLURM job 7, start 0, step 0, task 0): srun started this script 2 times without RANK"
        in (str(caught.value))
    )


@pytest.mark.parametrize(
    "changed",
    [{"SLURM_RESTART_COUNT": "1"}, {"SLURM_PROCID": "0"}, {"RANK": "1", "WORLD_SIZE": "2"}],
)
def test_an_earlier_start_of_the_job_or_of_the_ranks_is_waited_for(
    changed: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    locked_by_a_task: DirectoryLock,
) -> None:
    second = DirectoryLock(tmp_path)
    for name, value in {"SLURM_PROCID": "1", **changed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LockTimeoutError) as caught:
        acquire(second)
    assert not caught.value.is_sibling
