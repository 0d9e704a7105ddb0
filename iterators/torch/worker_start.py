"""What a loader's worker process does first: it leaves signals to the process that trains.

A launcher that stops a run signals its whole process group. Workers that died of that would take
the run with them before it has made its last checkpoint, so they leave the group; what ends them
is the loader, or the end of the process that trains. Picklable if the user's function is.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The ``worker_init_fn`` of our loaders, around the user's own."""

    user: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        _end_with_parent()
        if self.user is not None:
            self.user(worker)


def _end_with_parent() -> None:
    """Be killed when the thread that started this worker ends, which may already have happened.

    Torch's own watch begins later, and takes whoever is the parent by then for the right one.
    """
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)
