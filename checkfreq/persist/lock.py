"""The lock on a checkpoint directory: one writer at a time, held by the persist worker.

``flock`` on ``chk_dir/.lock``: the kernel releases it when the worker ends, however it ends. The
worker opens the file, never the trainer: a forked loader process would inherit the descriptor,
and keep the lock as long as it runs. Readers never lock. The file is its owner's alone: whoever can
open it, if only for reading, can hold the lock. A copy of the directory by hard links (``cp -al``)
has the same file: whoever locks either next makes a new one.

Removing or replacing the directory or the lock file takes the lock away: see `state`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkfreq.errors import StorageError
from checkfreq.store.fileops import LocalFileOps
from checkfreq.store.mounts import mount_of

_RETRY_S = 0.05
#: The record of a holder has about a hundred bytes.
_MAX_BYTES = 4096
#: Errors of ``flock`` on a file system without locks.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class LockTimeoutError(TimeoutError):
    """Another process kept the lock; ``holder`` describes it.

    ``is_sibling``: it is another task of the same step of a SLURM job, so nobody waited for it.
    """

    def __init__(self, holder: str, waited_s: float, *, is_sibling: bool = False) -> None:
        self.holder = holder
        self.is_sibling = is_sibling
        text = f"still locked by {holder} after {waited_s:.1f} s"
        if is_sibling:
            text = (
                f"locked by {holder}: srun started this script {os.environ.get('SLURM_NTASKS')} "
                f"times without {' and '.join(_missing_of_ranks())}, so each trains alone. To "
                "train together, let each task have RANK=$SLURM_PROCID and "
                "WORLD_SIZE=$SLURM_NTASKS, and call torch.distributed.init_process_group()"
            )
        super().__init__(text)


class LockState(enum.Enum):
    """Whether a lock that was acquired is still held, and why not."""

    HELD = "held"
    #: The directory is the same, but its lock file is not.
    UNLOCKED = "its .lock was removed or replaced"
    #: A different directory has the same path now.
    REPLACED = "it was replaced by another directory"
    GONE = "it was removed"


class DirectoryLock:
    """Exclusive ownership of one checkpoint directory. Tests pass their own ``flock``.

    ``name``: the file that is locked; a different one is a lock on something else there.
    """

    def __init__(
        self,
        chk_dir: Path,
        *,
        name: str = ".lock",
        flock: Callable[[int, int], None] = fcntl.flock,
    ) -> None:
        self._chk_dir = chk_dir
        self._path = chk_dir / name
        self._ops = LocalFileOps(chk_dir)
        self._flock = flock
        self._fd: int | None = None
        self._directory: tuple[int, int] | None = None

    def acquire(
        self,
        *,
        timeout_s: float,
        owner_pid: int,
        on_wait: Callable[[str], None],
        give_up: Callable[[float], bool],
    ) -> None:
        """Take the lock, waiting at most ``timeout_s`` for the previous run's worker to finish.

        ``on_wait(holder)`` is called once if another process has the lock. ``give_up(seconds)``
        sleeps between tries and returns whether to stop early. Raises LockTimeoutError, naming
        the holder.
        """
        start_s = time.monotonic()
        waiting = False
        while not self._try():
            holder, is_sibling = self._holder()
            waited_s = time.monotonic() - start_s
            if is_sibling or waited_s >= timeout_s or give_up(_RETRY_S):
                raise LockTimeoutError(holder, waited_s, is_sibling=is_sibling)
            if not waiting:
                waiting = True
                on_wait(holder)
        self._write_holder(owner_pid)
        if self._directory is None:
            self.remember_directory()

    def remember_directory(self) -> None:
        """From now on `state` compares with the directory that is there now."""
        self._directory = self._ops.identity(self._chk_dir)

    def state(self) -> LockState:
        """Whether the lock is still held on the directory that `remember_directory` saw."""
        try:
            if self._ops.identity(self._chk_dir) != self._directory:
                return LockState.REPLACED
        except FileNotFoundError:
            return LockState.GONE
        return LockState.HELD if self.is_held() else LockState.UNLOCKED

    def is_on_file_system_of(self, path: Path) -> bool:
        """Whether ``path`` is on the file system that the directory was on when it was locked."""
        return self._directory is not None and self._ops.identity(path)[0] == self._directory[0]

    def is_held(self) -> bool:
        """True while the locked file is still the one in the directory."""
        if self._fd is None:
            return False
        try:
            there = self._ops.identity(self._path)
        except FileNotFoundError:
            return False
        ours = os.fstat(self._fd)
        return there == (ours.st_dev, ours.st_ino)

    def release(self) -> None:
        """Release the lock; idempotent."""
        if self._fd is not None:
            # Closing is not enough: a process forked meanwhile has a copy of the descriptor.
            self._flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None

    def try_now(self, *, owner_pid: int) -> bool:
        """Take the lock if nobody has it; returns whether it is taken."""
        if not self._try():
            return False
        self._write_holder(owner_pid)
        return True

    def note_owner(self, owner_pid: int) -> None:
        """The lock is held for another training process from now on."""
        self._write_holder(owner_pid)

    def _try(self) -> bool:
        self.release()
        try:
            self._fd = self._ops.open_to_lock(self._path)
        except PermissionError as error:
            raise StorageError(
                error.errno,
                f"{error.strerror}: only its owner may lock it, since the runs in a directory are "
                "all one user's. Copy the directory (cp -r) and train in the copy; or remove this "
                "file, if no run of that user writes there",
                str(self._path),
            ) from None
        try:
            self._flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if self._has_other_names() and self._find_record() is None:
                self._take_new_file()
                return True
            self.release()
            return False
        except OSError as error:
            os.close(self._fd)
            self._fd = None
            raise self._refusal(error) from error
        if not self.is_held():  # the file was replaced between open and flock
            self.release()
            return False
        return True

    def _refusal(self, error: OSError) -> OSError:
        """The error to raise: where a file system has no locks, one that says what to do."""
        if error.errno not in _NO_LOCKS:
            return error
        mount = mount_of(self._chk_dir)
        where = "unknown" if mount is None else f"{mount.fs_type}, mounted at {mount.mount_point}"
        return StorageError(
            error.errno,
            f"{error.strerror}: flock is refused by the file system ({where}), so two runs could "
            "write there at once. Mount it with locks (NFS: a running lock service, or version 4; "
            "Lustre: -o flock), or put the directory on another file system",
            str(self._path),
        )

    def _has_other_names(self) -> bool:
        assert self._fd is not None
        return os.fstat(self._fd).st_nlink > 1

    def _take_new_file(self) -> None:
        """Lock a new file in place of one that is also in another directory."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            self._ops.unlink(fresh)  # left by a crash
        fd = self._ops.open_to_lock(fresh)
        try:
            self._flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._ops.replace(fresh, self._path)
        except BaseException:
            os.close(fd)
            raise
        self.release()
        self._fd = fd

    def _write_holder(self, owner_pid: int) -> None:
        if self._has_other_names():
            self._take_new_file()
        assert self._fd is not None
        record = {"worker_pid": os.getpid(), "trainer_pid": owner_pid, "host": socket.gethostname()}
        record |= {"step": _step(), "task": os.environ.get("SLURM_PROCID")}
        record["directory"] = self._ops.identity(self._chk_dir)[1]
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(record).encode(), 0)

    def _find_record(self) -> dict[str, Any] | None:
        return _record_in(self._ops, self._chk_dir, self._path)

    def _holder(self) -> tuple[str, bool]:
        """Who has the lock, and whether that is another task of our own step of a job."""
        try:
            record = self._find_record() or {}
            worker, host = int(record["worker_pid"]), record["host"]
            holder = (
                f"the persist worker {worker} of training process {record['trainer_pid']} "
                f"on host {host}"
            )
            step, task = record["step"], record["task"]
        except (ValueError, KeyError, TypeError):
            return "another process", False
        if host != socket.gethostname():
            holder += ", as .lock says"  # which nothing here can check
        elif not os.path.exists(f"/proc/{worker}"):
            return f"another process (`fuser -v {self._path}` shows it)", False
        if step is None:
            return holder, False
        is_ours = step == _step() and task != os.environ.get("SLURM_PROCID")
        return f"{holder} ({step}, task {task})", is_ours and bool(_missing_of_ranks())


def _record_in(ops: LocalFileOps, chk_dir: Path, path: Path) -> dict[str, Any] | None:
    """What the last holder of a directory's lock wrote; None if it held another directory's."""
    try:
        record = json.loads(ops.read_bytes(path, max_bytes=_MAX_BYTES))
        is_here = record["directory"] == ops.identity(chk_dir)[1]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return record if is_here else None


def _step() -> str | None:
    """Which start of which SLURM job, and which step of it, this is; None outside jobs."""
    if not (job := os.environ.get("SLURM_JOB_ID")):
        return None
    start, step = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ.get("SLURM_STEP_ID")
    return f"SLURM job {job}, start {start}, step {step}"


def _missing_of_ranks() -> list[str]:
    return [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]


def holder_of(chk_dir: Path, *, name: str = ".lock") -> int | None:
    """The training process for which a worker holds the lock now; None if nobody does."""
    return _held_by("trainer_pid", chk_dir, name=name)


def worker_of(chk_dir: Path) -> int | None:
    """The worker that holds the lock now; None if nobody does."""
    return _held_by("worker_pid", chk_dir, name=".lock")


def _held_by(what: str, chk_dir: Path, *, name: str) -> int | None:
    """A process in the holder's record.

    For a reader: the lock is tried, shared, for an instant. None also where it cannot be told.
    """
    ops = LocalFileOps(chk_dir)
    path = chk_dir / name
    try:
        if name not in ops.listdir(chk_dir):
            return None
        fd = ops.open_to_lock(path)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
        return None
    except OSError:
        pass
    finally:
        os.close(fd)
    try:
        return int((_record_in(ops, chk_dir, path) or {})[what])
    except (ValueError, KeyError, TypeError):
        return None
