"""Replicated tensors divided among the ranks of a group. Pure; no torch.

Every rank computes the same division from sizes alone, so none has to be told. Tensors are
walked in order as if they lay one after another, and cut where a rank's share ends: a large
one between two rows (dimension 0), a small one not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

#: A tensor below this fraction of a share stays whole, so parts differ by twice as much at most.
_SMALL = 1 / 16


class Item(NamedTuple):
    """A tensor: ``num_rows`` is 0 if it cannot be cut; ``stays`` with the first of the group."""

    num_bytes: int
    num_rows: int
    stays: bool


class Portion(NamedTuple):
    """Rows ``begin`` to ``end`` of a tensor, or all of it (None), for one of the group."""

    member: int
    rows: tuple[int, int] | None


def divide(items: Sequence[Item], num_members: int) -> list[list[Portion]]:
    """The portions of each item."""
    staying = sum(item.num_bytes for item in items if item.stays)
    moving = sum(item.num_bytes for item in items) - staying
    share = (staying + moving) / num_members
    first = max(0.0, share - staying) if num_members > 1 else float(moving)
    others = (moving - first) / max(1, num_members - 1)
    ends = [first + others * member for member in range(num_members)]
    portions, begin = [], 0
    for item in items:
        if item.stays or not item.num_bytes:
            portions.append([Portion(0, None)])
            continue
        portions.append(list(_portions(item, begin, ends, small=share * _SMALL)))
        begin += item.num_bytes
    return portions


def _portions(item: Item, begin: int, ends: list[float], *, small: float) -> Iterator[Portion]:
    if item.num_rows < 2 or item.num_bytes <= small:
        yield Portion(_member_at(begin + item.num_bytes / 2, ends), None)
        return
    row_bytes = item.num_bytes / item.num_rows
    cuts = [round((end - begin) / row_bytes) for end in ends[:-1]]
    rows = [0, *(min(max(cut, 0), item.num_rows) for cut in cuts), item.num_rows]
    for member, (start, end) in enumerate(pairwise(rows)):
        if (start, end) == (0, item.num_rows):
            yield Portion(member, None)
        elif end > start:
            yield Portion(member, (start, end))


def _member_at(place: float, ends: list[float]) -> int:
    return next((i for i, end in enumerate(ends[:-1]) if place < end), len(ends) - 1)
