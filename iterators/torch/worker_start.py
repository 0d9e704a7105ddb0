"""The start of a loader worker: it leaves the process group, and ends with the trainer.

A launcher that stops a run signals its whole process group. Workers killed by that signal would
make the loader fail before the last checkpoint is taken, so they leave the group. They are ended
by the loader, at the end of the training process (``workers_started``), or by the kernel if that
process is killed. One that is sent SIGTERM all the same ends between two instructions and hands
over its last batch, so that it releases the locks that it shares with the trainer, which would
wait for them for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

_PR_SET_PDEATHSIG = 1
_CPU = torch.device("cpu")
_is_on_cpu = False  # a forked worker inherits it, and the context that it tells of


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """The CPU is the default device, in workers that are started here as well."""
    global _is_on_cpu
    with _CPU:
        _is_on_cpu = True
        try:
            yield
        finally:
            _is_on_cpu = False


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The ``worker_init_fn`` of our loaders, around the user's own. Picklable if that one is."""

    user: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, _leave)
        _end_with_parent()
        if _is_on_cpu:
            _stay_on_cpu()
        if self.user is not None:
            self.user(worker)


def _stay_on_cpu() -> None:
    """Make the CPU the default device without a context, or the user could set no other."""
    _CPU.__exit__(None, None, None)
    with contextlib.suppress(AssertionError):  # torch's, in a context of the user's own
        torch.set_default_device(_CPU)
    if torch.get_default_device() != _CPU:
        _CPU.__enter__()


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _end_with_parent() -> None:
    """Have the kernel kill this worker when the thread that started it ends.

    Torch checks for a dead parent too, but only later, and it compares with the parent process at
    that time, which is already a different one if the trainer has died during the start.
    """
    with contextlib.suppress(OSError, AttributeError):  # there is no prctl except on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # After prctl, not before: a parent that dies between the two would go unnoticed otherwise.
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)
