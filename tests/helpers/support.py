"""What the tests of savers share: states of a disk in which a crash may have left it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from checkfreq.testing import CrashingFileOps, PowerCut

ROOT = Path("/out")


def empty_disk() -> CrashingFileOps:
    """A disk with the folder ``/out``, durably."""
    ops = CrashingFileOps()
    ops.mkdir(ROOT)
    ops.sync_dir(Path("/"))
    return ops


def after_a_cut_anywhere(
    disk: CrashingFileOps, act: Callable[[CrashingFileOps], object]
) -> Iterator[tuple[CrashingFileOps, bool]]:
    """Every disk that a power cut during ``act`` could leave, and whether ``act`` had returned."""
    undisturbed = disk.fork()
    begun = len(undisturbed.calls)
    act(undisturbed)
    num_calls = len(undisturbed.calls) - begun
    assert num_calls > 3
    for instant in range(num_calls + 1):
        twin = disk.fork()
        twin.cut_power_after(instant)
        returned = True
        try:
            act(twin)
        except PowerCut:
            returned = False
        assert returned == (instant == num_calls)
        yield from ((left, returned) for left in twin.survivors())


def loaded(data: bytes) -> Any:
    """What ``torch.save`` had saved."""
    return torch.load(io.BytesIO(data))
