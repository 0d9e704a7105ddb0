"""What the arms of the resume table share: preparing and resuming, and samples at no cost."""

from __future__ import annotations

import os
from collections.abc import Callable

from torch.utils.data import Dataset

from iterators import CFIterator, Ledger, Position
from iterators.protocol import Adapter

BATCH = 256
#: The memory of a permutation kept as a list: an int64 in a tensor, a pointer and a Python int.
BYTES_PER_LISTED_ID = 8 + 8 + 32

#: Builds everything from scratch; returns the first batch, and the loader to shut down.
Resume = Callable[[], tuple[object, object]]
#: (samples, batches before the position) -> how to resume there.
Prepare = Callable[[int, int], Resume]


class Numbers(Dataset[int]):
    """Sample ``i`` is ``i``, at no cost."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class CannotResume(Exception):
    """The arm cannot resume here; the message says why."""


def entering(make: Callable[[], Adapter], batches: int) -> Resume:
    """A resume of ours. The position is made here, without iterating to it."""
    place = batches * BATCH
    # Before the end of the epoch only the ledger's count is read.
    state = Position(make().identity, position=place, ledger=Ledger(count=place)).to_dict()

    def resume() -> tuple[object, object]:
        iterator = CFIterator(make())
        iterator.load_state_dict(state)
        served = iter(iterator)
        return next(served), served

    return resume


def require_memory(n: int, *, bytes_each: int = BYTES_PER_LISTED_ID) -> None:
    """Raise CannotResume if a list of all samples of an epoch would not fit into memory."""
    needed = n * bytes_each
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory // 2:
        raise CannotResume(
            f"a list of {n:,} samples takes about {needed / 2**30:.0f} GiB; this machine has "
            f"{memory / 2**30:.0f}"
        )
