"""The worker's process as the trainer sees it: a child, or one that an earlier trainer started.

A process that is not a child is held by a pidfd, which never means another process, and whose exit
code is its parent's to know. No method is called by two threads at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from typing import Protocol

from checkfreq.persist import outlived
from checkfreq.persist.launch import worker_command, worker_environment


class WorkerProcess(Protocol):
    """One worker process, running or ended."""

    @property
    def pid(self) -> int:
        """Its process id, for messages."""
        ...

    def is_alive(self) -> bool:
        """Whether it runs."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; returns whether it has ended."""
        ...

    def kill(self) -> None:
        """Send SIGKILL, also to one that has ended."""
        ...

    @property
    def exit_code(self) -> int | None:
        """As ``subprocess`` has it; None while it runs, and for good if it is no child of ours."""
        ...

    def close(self) -> None:
        """Let go of one that has ended; idempotent."""
        ...


class ChildWorker:
    """A worker that this process started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(cls, socket_fd: int, *, stderr_fd: int, nice: int) -> ChildWorker:
        """Start a worker at the other end of ``socket_fd``."""
        # Opened here, not by the worker: our process id may mean another process by then.
        pidfd = os.pidfd_open(os.getpid())
        try:
            with outlived.blocked():
                return cls(_popen((socket_fd, pidfd), stderr_fd, nice))
        finally:
            os.close(pidfd)

    @property
    def pid(self) -> int:
        """See WorkerProcess."""
        return self._process.pid

    def is_alive(self) -> bool:
        """See WorkerProcess."""
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> bool:
        """See WorkerProcess."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return not self.is_alive()

    def kill(self) -> None:
        """See WorkerProcess."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    @property
    def exit_code(self) -> int | None:
        """See WorkerProcess."""
        return self._process.poll()

    def close(self) -> None:
        """See WorkerProcess."""


class AdoptedWorker:
    """A worker that an earlier trainer started, behind ``pidfd``, which is closed with it."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self._pid = pid
        self._pidfd = pidfd

    @property
    def pid(self) -> int:
        """See WorkerProcess."""
        return self._pid

    def is_alive(self) -> bool:
        """See WorkerProcess."""
        return not self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """See WorkerProcess."""
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def kill(self) -> None:
        """See WorkerProcess."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    @property
    def exit_code(self) -> int | None:
        """See WorkerProcess."""
        return None

    def close(self) -> None:
        """See WorkerProcess."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def how_it_ended(process: WorkerProcess) -> str:
    """For messages: how a worker came to its end, or that it has not."""
    if process.is_alive():
        return "stopped answering"
    code = process.exit_code
    if code is None:
        return "ended"
    return (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )


def _popen(fds: tuple[int, int], stderr_fd: int, nice: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        worker_command((*fds, os.getpid(), nice)),
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        # A pipe inherited from the trainer would stay open as long as the worker runs, and
        # a program that reads the trainer's output would wait for it.
        stdout=subprocess.DEVNULL,
        stderr=stderr_fd,
        start_new_session=True,  # Ctrl-C and a closed terminal signal the trainer's group
        env=worker_environment(),
    )
