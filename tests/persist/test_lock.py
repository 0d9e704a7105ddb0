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

from checkfreq.errors import StorageError
from checkfreq.persist.lock import DirectoryLock, LockTimeoutError, holder_of
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


def test_a_second_one_is_refused_with_the_holders_name_until_its_release(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    acquire(first)
    assert first.is_held()
    assert first._fd is not None
    copy = os.dup(first._fd)  # what a fork makes
    waits: list[str] = []

    def give_up(seconds: float) -> bool:
        tries.append(seconds)
        if len(tries) == 3:
            first.release()
        return False

    tries: list[float] = []
    with pytest.raises(LockTimeoutError) as caught:
        acquire(second)
    assert f"persist worker {os.getpid()} of training process 4711" in caught.value.holder
    assert not second.is_held()
    acquire(second, timeout_s=60.0, on_wait=waits.append, give_up=give_up)
    assert second.is_held()
    assert (len(tries), len(waits)) == (3, 1)
    second.release()
    second.release()
    os.close(copy)


def test_a_holder_that_ended_or_cannot_be_read_is_another_process(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait(DEADLINE_S)
    first = DirectoryLock(tmp_path)
    acquire(first)
    record = json.loads((tmp_path / ".lock").read_text())
    for text in ("", "[]", json.dumps({**record, "worker_pid": ended.pid})):
        (tmp_path / ".lock").write_text(text)
        with pytest.raises(LockTimeoutError, match="another process"):
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


def test_a_copy_by_hard_links_is_locked_apart_whoever_owns_the_first(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("changed", "is_sibling"),
    [
        ({}, True),
        ({"SLURM_RESTART_COUNT": "1"}, False),
        ({"SLURM_PROCID": "0"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
    ],
)
def test_of_two_tasks_of_a_step_that_are_no_ranks_the_second_does_not_wait_and_others_do(
    changed: dict[str, str], is_sibling: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"JOB_ID": "7", "STEP_ID": "0", "NTASKS": "2", "PROCID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    acquire(DirectoryLock(tmp_path))
    second = DirectoryLock(tmp_path)
    for name, value in {"SLURM_PROCID": "1", **changed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LockTimeoutError) as caught:
        acquire(second, timeout_s=3600.0, give_up=lambda seconds: True)
    assert caught.value.is_sibling is is_sibling
    assert "(SLURM job 7, start 0, step 0, task 0)" in str(caught.value)
