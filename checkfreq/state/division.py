"""Replicated tensors divided among the ranks of a group. Pure; no torch.

Every rank computes the same division from sizes alone, so none has to be told. Tensors are
walked in order as if they lay one after another, and cut where a rank's share ends: a large
one between two rows (dimension 0), a small one not at all.
"""

from __future__ import annotations

import math
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


def divide(items: Sequence[Item], num_members: int) -> list[tuple[Portion, ...]]:
    """The portions of each item."""
    total = sum([item.num_bytes for item in items])
    moving = sum([item.num_bytes for item in items if not item.stays])
    share = total / num_members
    ends = _ends(moving, share - (total - moving), num_members)
    whole = [(Portion(member, None),) for member in range(num_members)]
    portions: list[tuple[Portion, ...]] = []
    begin = member = 0
    for item in items:
        if item.stays or not item.num_bytes:
            portions.append(whole[0])
            continue
        if item.num_rows > 1 and item.num_bytes > share * _SMALL:
            portions.append(tuple(_cut(item, begin, ends)))
        else:
            while begin + item.num_bytes / 2 >= ends[member]:
                member += 1
            portions.append(whole[member])
        begin += item.num_bytes
    return portions


def _ends(moving: int, first: float, num_members: int) -> list[float]:
    """Where the shares end, of what may move, if the first member takes ``first`` of it."""
    first = max(0.0, first)
    other = (moving - first) / max(1, num_members - 1)
    return [*(first + other * member for member in range(num_members - 1)), math.inf]


def _cut(item: Item, begin: int, ends: list[float]) -> Iterator[Portion]:
    row_bytes = item.num_bytes / item.num_rows
    cuts = [round((end - begin) / row_bytes) for end in ends[:-1]]
    rows = [0, *(min(max(cut, 0), item.num_rows) for cut in cuts), item.num_rows]
    for member, (start, end) in enumerate(pairwise(rows)):
        if (start, end) == (0, item.num_rows):
            yield Portion(member, None)
        elif end > start:
            yield Portion(member, (start, end))
