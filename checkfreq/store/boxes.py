"""Whether boxes cover a larger tensor exactly: all of it, and nothing twice. Pure.

A rank's share of a tensor is a box: the offset of its first element and its sizes in each
dimension. Boxes of no elements, and the one box of a tensor without dimensions, are boxes too.
Time is about n log n for shardings that cut along dimensions; only what no straight cut
separates is compared pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a tensor from ``offsets``, of ``sizes``, that ``rank`` wrote."""

    rank: int
    offsets: Shape
    sizes: Shape

    def __str__(self) -> str:
        return f"{list(self.sizes)} at {list(self.offsets)} of rank {self.rank}"

    @property
    def num_elements(self) -> int:
        """How many elements it holds."""
        return math.prod(self.sizes)

    def end(self, dim: int) -> int:
        """Behind its last index in a dimension."""
        return self.offsets[dim] + self.sizes[dim]

    def lies_in(self, shape: Shape) -> bool:
        """Whether it has as many dimensions as ``shape`` and nothing outside of it."""
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        return all(
            self.offsets[dim] >= 0 and self.end(dim) <= size for dim, size in enumerate(shape)
        )

    def overlaps(self, other: Box) -> bool:
        """Whether an element is in both; neither of them is empty."""
        return all(
            self.offsets[dim] < other.end(dim) and other.offsets[dim] < self.end(dim)
            for dim in range(len(self.offsets))
        )


def fault_of(shape: Shape, boxes: Sequence[Box], *, whole: bool = True) -> str:
    """What is wrong with the cover, expected against found; "" if nothing is.

    ``whole``: that nothing is missing is asked for too.
    """
    for box in boxes:
        if not box.lies_in(shape):
            return f"expected a box within {list(shape)}, found {box}"
    filled = [box for box in boxes if box.num_elements]
    for one, other in _overlaps(filled):
        return f"expected each element once, found {one} and {other}"
    found, expected = sum(box.num_elements for box in filled), math.prod(shape)
    if whole and found != expected:
        ranks = ", ".join(str(rank) for rank in sorted({box.rank for box in boxes}))
        return f"expected {expected} elements of {list(shape)}, found {found} from rank(s) {ranks}"
    return ""


def _overlaps(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs that overlap. Boxes on two sides of a straight cut do not."""
    stack = [list(boxes)]
    while stack:
        group = stack.pop()
        pieces = _cut(group) if len(group) > 2 else [group]
        if len(pieces) > 1:
            stack.extend(pieces)
        else:
            yield from (pair for pair in combinations(group, 2) if pair[0].overlaps(pair[1]))


def _cut(boxes: Sequence[Box]) -> list[list[Box]]:
    """The groups into which planes across the first dimension that has any separate them."""
    pieces: list[list[Box]] = []
    for dim in range(len(boxes[0].offsets)):
        pieces, end = [], -1
        for box in sorted(boxes, key=lambda box: box.offsets[dim]):
            if box.offsets[dim] >= end or not pieces:
                pieces.append([])
            pieces[-1].append(box)
            end = max(end, box.end(dim))
        if len(pieces) > 1:
            break
    return pieces or [list(boxes)]
