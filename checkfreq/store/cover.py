"""Checks that shards cover a tensor exactly: every element once. Pure.

Takes about O(n log n) for shardings that split along dimensions. Only boxes that no straight cut
separates are compared pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from checkfreq.store.boxes import Box

Shape = tuple[int, ...]


class Placed(NamedTuple):
    """A box, and the rank that wrote it."""

    rank: int
    box: Box

    def __str__(self) -> str:
        return f"{list(self.box.sizes)} at {list(self.box.offsets)} of rank {self.rank}"


def fault_of(shape: Shape, boxes: Sequence[Placed], *, whole: bool = True) -> str:
    """What is wrong with the cover, as expected and found; "" if nothing is.

    ``whole``: also require that no element is missing.
    """
    for placed in boxes:
        if not placed.box.lies_in(shape):
            return f"expected a box within {list(shape)}, found {placed}"
    filled = [placed for placed in boxes if placed.box.num_elements]
    for one, other in _overlaps(filled):
        return f"expected each element once, found {one} and {other}"
    found, expected = sum(placed.box.num_elements for placed in filled), math.prod(shape)
    # Without overlaps and outliers, as many elements as the tensor has means all of them.
    if whole and found != expected:
        ranks = ", ".join(str(rank) for rank in sorted({placed.rank for placed in boxes}))
        return f"expected {expected} elements of {list(shape)}, found {found} from rank(s) {ranks}"
    return ""


def _overlaps(boxes: Sequence[Placed]) -> Iterator[tuple[Placed, Placed]]:
    """Pairs that overlap: divide and conquer, since boxes on two sides of a cut do not."""
    stack = [list(boxes)]
    while stack:
        group = stack.pop()
        pieces = _cut(group) if len(group) > 2 else [group]
        if len(pieces) > 1:
            stack.extend(pieces)
        else:
            yield from (pair for pair in combinations(group, 2) if pair[0].box.overlap(pair[1].box))


def _cut(boxes: Sequence[Placed]) -> list[list[Placed]]:
    """Groups separated by planes across the first dimension that has such planes; else one."""
    pieces: list[list[Placed]] = []
    for dim in range(len(boxes[0].box.offsets)):
        pieces, end = [], -1
        for placed in sorted(boxes, key=lambda placed: placed.box.offsets[dim]):
            if placed.box.offsets[dim] >= end or not pieces:
                pieces.append([])
            pieces[-1].append(placed)
            end = max(end, placed.box.offsets[dim] + placed.box.sizes[dim])
        if len(pieces) > 1:
            break
    return pieces or [list(boxes)]
