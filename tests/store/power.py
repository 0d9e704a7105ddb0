"""A power cut at every instant of what is done to a disk, and every disk that it can leave."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from checkfreq.store.fileops import PayloadFile
from checkfreq.testing import CrashingFileOps, PowerCut


class Left(NamedTuple):
    """What a cut after ``num_calls`` of the disk left; ``finished``: it came after all of them."""

    num_calls: int
    finished: bool
    disk: CrashingFileOps


def cuts(
    disk: CrashingFileOps, act: Callable[[CrashingFileOps], object], *, limit: int = 256
) -> Iterator[Left]:
    """Every disk that a cut at any operation of ``act``, or after it, can leave."""
    for num_calls in itertools.count():
        twin = disk.fork()
        twin.cut_power_after(num_calls)
        finished = False
        try:
            act(twin)
            finished = True
        except PowerCut:
            pass
        for left in twin.survivors(limit=limit, seed=num_calls):
            yield Left(num_calls, finished, left)
        if finished:
            return


class UnsyncedPayload:
    """A payload file that says it is synced and is not."""

    def __init__(self, file: PayloadFile) -> None:
        self.direct = file.direct
        self.pwrite = file.pwrite
        self.truncate = file.truncate
        self.close = file.close

    def datasync(self) -> None:
        pass
