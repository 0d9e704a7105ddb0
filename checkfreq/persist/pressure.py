"""Whether memory is short, so that a worker that only keeps some should give it back.

The kernel tells by its pressure files where it has them, to be polled; elsewhere, and besides, what
is available is looked at now and then. The last resort is the kernel's own: it is asked to end this
process before any other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from checkfreq.snapshot.memory import available_host_bytes

#: Tell when tasks waited for memory for 0.3 of 2 seconds, the shortest window that needs no
#: privileges.
_TRIGGER = b"some 300000 2000000"
_LEAST_BYTES = 128 << 20
_FIRST_TO_GO = "1000"
_OWN_SCORE = Path("/proc/self/oom_score_adj")


def pressure_files(own: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """The pressure files of the machine, and of this process's cgroup."""
    files = [Path("/proc/pressure/memory")]
    with contextlib.suppress(OSError):
        groups = [g[4:] for g in own.read_text().splitlines() if g.startswith("0::/")]
        files += [Path("/sys/fs/cgroup") / group / "memory.pressure" for group in groups]
    return files


class MemoryPressure:
    """Watches the memory that others need, while ``held_bytes`` are kept here.

    Short means that less than a sixteenth of what is held, and less than 128 MiB, is available.
    """

    def __init__(
        self,
        held_bytes: int,
        *,
        available: Callable[[], int | None] = available_host_bytes,
        files: Sequence[Path] | None = None,
    ) -> None:
        self._least_bytes = max(_LEAST_BYTES, held_bytes // 16)
        self._available = available
        self._fds: list[int] = []
        for file in pressure_files() if files is None else files:
            self._watch(file)

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that have POLLPRI once memory is short. There may be none."""
        return tuple(self._fds)

    def is_short(self) -> bool:
        """Whether memory is short now, as far as that can be told."""
        available = self._available()
        return available is not None and available < self._least_bytes

    def close(self) -> None:
        """Stop watching; idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def _watch(self, file: Path) -> None:
        with contextlib.suppress(OSError):  # not there, or not allowed
            fd = os.open(file, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, _TRIGGER)
            except OSError:
                os.close(fd)
                raise
            self._fds.append(fd)


@contextlib.contextmanager
def first_to_go(score: Path = _OWN_SCORE) -> Iterator[None]:
    """In the block, the kernel ends this process first when it runs out of memory."""
    before = None
    with contextlib.suppress(OSError):
        before = score.read_text()
        score.write_text(_FIRST_TO_GO)
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError):
                score.write_text(before)
