"""The lock on a checkpoint directory: one writer at a time, held by the persist worker.

``flock`` on ``chk_dir/.lock``: the kernel lets go when the worker ends, however it ends. The
worker opens it, never the trainer, because a forked loader process would keep an inherited
descriptor, and with it the lock. Readers never lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

_RETRY_S = 0.05


class LockTimeoutError(TimeoutError):
    """Another process kept the lock; ``holder`` describes it."""

    def __init__(self, holder: str, waited_s: float) -> None:
        self.holder = holder
        super().__init__(f"still locked by {holder} after {waited_s:.1f} s")


class DirectoryLock:
    """Exclusive ownership of one checkpoint directory."""

    def __init__(self, chk_dir: Path) -> None:
        self._path = chk_dir / ".lock"
        self._fd: int | None = None

    def acquire(
        self,
        *,
        timeout_s: float,
        owner_pid: int,
        on_wait: Callable[[str], None],
        give_up: Callable[[float], bool],
    ) -> None:
        """Take the lock, waiting for a predecessor's worker to finish.

        ``on_wait(holder)`` is called once if there is anything to wait for, and
        ``give_up(seconds)`` sleeps between tries and says whether to stop early.
        Raises LockTimeoutError, naming the holder.
        """
        start_s = time.monotonic()
        waiting = False
        while not self._try():
            holder = self._holder()
            waited_s = time.monotonic() - start_s
            if waited_s >= timeout_s or give_up(_RETRY_S):
                raise LockTimeoutError(holder, waited_s)
            if not waiting:
                waiting = True
                on_wait(holder)
        self._write_holder(owner_pid)

    def is_held(self) -> bool:
        """True while the locked file is still the one in the directory."""
        if self._fd is None:
            return False
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        ours = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def release(self) -> None:
        """Let go; idempotent."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # a process forked meanwhile has a copy of it
            os.close(self._fd)
            self._fd = None

    def _try(self) -> bool:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._fd = fd
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        if not self.is_held():  # the file was replaced between open and flock
            self.release()
            return False
        return True

    def _write_holder(self, owner_pid: int) -> None:
        assert self._fd is not None
        record = {"worker_pid": os.getpid(), "trainer_pid": owner_pid, "host": socket.gethostname()}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(record).encode(), 0)

    def _holder(self) -> str:
        try:
            record = json.loads(self._path.read_bytes())
            return (
                f"the persist worker {record['worker_pid']} of training process "
                f"{record['trainer_pid']} on host {record['host']}"
            )
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"
