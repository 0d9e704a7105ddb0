"""What slows a recorded run down from outside, each as a ``with`` block. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.lab.load import Load

#: Slows the processes of a group down while it is open: (folder, group) -> context.
Slow = Callable[[Path, int], AbstractContextManager[object]]

_PERIOD_S = 0.1


def nothing(folder: Path, group: int) -> AbstractContextManager[object]:
    """The run is alone."""
    return contextlib.nullcontext()


def neighbour(folder: Path, group: int) -> AbstractContextManager[object]:
    """As many processes that compute as there are cores, and one that writes."""
    return Load(folder, hogs=os.cpu_count() or 1, mib=64)


@contextlib.contextmanager
def bursts(folder: Path, group: int) -> Iterator[None]:
    """The neighbour for 3 s of every 12 s."""
    with _repeating(lambda over: _burst(folder, over)):
        yield


@contextlib.contextmanager
def throttled(folder: Path, group: int) -> Iterator[None]:
    """The group's processes run for 60 ms of every 100 ms, as under a quota of their cgroup."""
    with _repeating(lambda over: _stop_for_a_while(group, over)):
        yield
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGCONT)


def _burst(folder: Path, over: threading.Event) -> None:
    if over.wait(9.0):
        return
    with Load(folder, hogs=os.cpu_count() or 1, mib=64):
        over.wait(3.0)


def _stop_for_a_while(group: int, over: threading.Event) -> None:
    if over.wait(0.6 * _PERIOD_S):
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGSTOP)
        over.wait(0.4 * _PERIOD_S)
        os.killpg(group, signal.SIGCONT)


@contextlib.contextmanager
def _repeating(act: Callable[[threading.Event], None]) -> Iterator[None]:
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            act(over)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
