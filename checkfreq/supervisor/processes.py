"""Child processes: start one, learn how it ended, and be the parent of those that lose theirs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
#: What Python ignores for itself, as `subprocess` does.
RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)
#: How a persist worker is known among processes: in its command line.
WORKER = b"checkfreq.persist.worker"
#: Of a shell: a command that cannot be run, or was not found.
NOT_RUN, NOT_FOUND = 126, 127


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended; ``code`` is negative for a signal, as `subprocess` has it."""

    code: int

    @property
    def status(self) -> int:
        """The exit status that a shell would say."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def signal_number(self) -> int | None:
        """The signal that ended it; None if it exited."""
        return -self.code if self.code < 0 else None

    def __str__(self) -> str:
        return (
            f"exit status {self.code}" if self.code >= 0 else f"exit by {signal_name(-self.code)}"
        )


def signal_name(number: int) -> str:
    """``SIGTERM``; a real-time signal has no name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def start(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    mask: set[int],
    fds: Mapping[int, int] | None = None,
) -> int:
    """Start a command in our process group, with our standard streams; returns its process id.

    ``mask``: the signals that it begins with blocked. ``fds``: the numbers under which it gets
    descriptors of ours; it gets no others. Raises FileNotFoundError or another OSError.
    """
    actions = [(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in (fds or {}).items()]
    return os.posix_spawnp(
        command[0],
        list(command),
        environ,
        setsigmask=mask,
        setsigdef=RESTORED,
        file_actions=actions,
    )


def reap() -> dict[int, Ended]:
    """Every child that has ended since the last call, by process id."""
    ended: dict[int, Ended] = {}
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = Ended(os.waitstatus_to_exitcode(wait_status))


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all below it, but the persist workers: they finish what they write."""
    for one in [pid, *_below(pid)]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)


def _below(pid: int) -> Iterator[int]:
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _read(listed).split()):
            if WORKER not in _read(Path(f"/proc/{child}/cmdline")):
                yield child
                yield from _below(child)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def become_subreaper() -> None:
    """Have the kernel give us the children of children that end, as it gives them to PID 1.

    The worker of a killed trainer is then a child of ours, wherever we run. Nothing is lost where
    the kernel refuses: it goes to whoever is next.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
