"""What the arms of the resume table share: how one is prepared and resumed, and free samples."""

from __future__ import annotations

import os
from collections.abc import Callable

from torch.utils.data import Dataset

from iterators import CFIterator, Ledger, Position
from iterators.protocol import Adapter

BATCH = 256
#: What a permutation kept as a list takes: an int64 in a tensor, a pointer and a Python int.
BYTES_PER_LISTED_ID = 8 + 8 + 32

#: Builds everything anew; returns the first batch behind the place, and what would be taken down.
Resume = Callable[[], tuple[object, object]]
#: (samples, batches behind the place) -> how to resume there.
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
    """The arm cannot do this at all; the message says why."""


def entering(make: Callable[[], Adapter], batches: int) -> Resume:
    """A position needs no run up to it: it is made here."""
    place = batches * BATCH
    # The ledger's count is all that is asked of it before the epoch's end.
    state = Position(make().identity, position=place, ledger=Ledger(count=place)).to_dict()

    def resume() -> tuple[object, object]:
        iterator = CFIterator(make())
        iterator.load_state_dict(state)
        served = iter(iterator)
        return next(served), served

    return resume


def require_room(n: int, *, bytes_each: int = BYTES_PER_LISTED_ID) -> None:
    """The arm keeps every sample of an epoch in a list."""
    needed = n * bytes_each
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory // 2:
        raise CannotResume(
            f"a list of {n:,} samples takes about {needed / 2**30:.0f} GiB; this machine has "
            f"{memory / 2**30:.0f}"
        )
