"""Divides replicated tensors among the ranks of a group. Pure; no torch.

Every rank computes the same division from the sizes alone, so they need not talk. The tensors are
walked in order as if they lay one after another, and each rank gets a stretch of equal length: a
large tensor is split where a stretch ends, between two rows (dimension 0), a small one is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

#: A tensor below this fraction of a rank's share is not split, so shares differ by at most twice
#: as much.
_SMALL = 1 / 16


class TensorSize(NamedTuple):
    """One tensor; ``num_rows`` is 0 if it cannot be split.

    ``stays``: the first rank of the group writes it, whatever its size.
    """

    num_bytes: int
    num_rows: int
    stays: bool


class Assignment(NamedTuple):
    """Rows [begin, end) of a tensor, or all of it (None), for one member of the group."""

    member: int
    rows: tuple[int, int] | None


def divide(sizes: Sequence[TensorSize], num_members: int) -> list[tuple[Assignment, ...]]:
    """Who writes which rows of each tensor."""
    total = sum([size.num_bytes for size in sizes])
    moving = sum([size.num_bytes for size in sizes if not size.stays])
    share = total / num_members
    ends = _ends(moving, share - (total - moving), num_members)
    whole = [(Assignment(member, None),) for member in range(num_members)]
    assignments: list[tuple[Assignment, ...]] = []
    begin = member = 0
    for size in sizes:
        if size.stays or not size.num_bytes:
            assignments.append(whole[0])
            continue
        if size.num_rows > 1 and size.num_bytes > share * _SMALL:
            assignments.append(tuple(_split_rows(size, begin, ends)))
        else:
            # It goes to the member in whose stretch its middle lies.
            while begin + size.num_bytes / 2 >= ends[member]:
                member += 1
            assignments.append(whole[member])
        begin += size.num_bytes
    return assignments


def _ends(moving: int, first: float, num_members: int) -> list[float]:
    """Where each stretch of the movable bytes ends, if the first member takes ``first`` of them."""
    first = max(0.0, first)
    other = (moving - first) / max(1, num_members - 1)
    # Infinity and not the sum: rounding must not leave the last tensor without a member.
    return [*(first + other * member for member in range(num_members - 1)), math.inf]


def _split_rows(size: TensorSize, begin: int, ends: list[float]) -> Iterator[Assignment]:
    row_bytes = size.num_bytes / size.num_rows
    bounds = [round((end - begin) / row_bytes) for end in ends[:-1]]
    rows = [0, *(min(max(bound, 0), size.num_rows) for bound in bounds), size.num_rows]
    for member, (start, end) in enumerate(pairwise(rows)):
        if (start, end) == (0, size.num_rows):
            yield Assignment(member, None)
        elif end > start:
            yield Assignment(member, (start, end))
