"""The signals that the worker outlives: a scheduler sends them to every process of a job.

SLURM finds the worker in its session of its own, and so do a container's runtime and ``kill``. They
are blocked while the worker starts, so that none comes before it ignores them.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

OUTLIVED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM),
)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """What this thread starts in the block begins with the signals blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OUTLIVED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Ignore them for good, those that came while they were blocked included."""
    for number in OUTLIVED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OUTLIVED)
