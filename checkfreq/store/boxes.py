"""Boxes: axis-aligned regions of a tensor (shards), as offsets and sizes. Pure; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from operator import add
from typing import NamedTuple

from checkfreq.types import PAGE_BYTES

#: Ranges of bytes that a box is at most read in.
_MOST_RANGES = 4096


class Box(NamedTuple):
    """The region that starts at ``offsets`` and has ``sizes`` elements, per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """The box that is a whole tensor of that shape."""
        sizes = tuple(shape)
        return cls((0,) * len(sizes), sizes)

    @property
    def num_elements(self) -> int:
        """How many elements it has; 1 for the box of a scalar."""
        return math.prod(self.sizes)

    def is_whole(self, shape: Iterable[int]) -> bool:
        """Whether it is the whole of a tensor of that shape."""
        return self == Box.whole(shape)

    def lies_in(self, shape: tuple[int, ...]) -> bool:
        """Whether the box fits in a tensor of that shape."""
        return len(shape) == len(self.sizes) == len(self.offsets) and all(
            min(offset, size) >= 0 and offset + size <= length
            for offset, size, length in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def overlap(self, other: Box) -> Box | None:
        """The intersection with another box; None if it is empty."""
        begins = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(one + num, two + length) - begin
            for one, num, two, length, begin in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, begins, strict=True
            )
        )
        return Box(begins, sizes) if all(size > 0 for size in sizes) else None

    def within(self, other: Box) -> Box:
        """The same box, with offsets relative to ``other``, which contains it."""
        offsets = (mine - its for mine, its in zip(self.offsets, other.offsets, strict=True))
        return Box(tuple(offsets), self.sizes)

    def span_in(self, shape: Sequence[int]) -> tuple[int, int]:
        """Its first element in row-major order, and the one after its last."""
        last = map(add, self.offsets, (size - 1 for size in self.sizes))
        return _index(self.offsets, shape), _index(last, shape) + 1

    def byte_ranges_in(self, outer: Box, item_bytes: int) -> tuple[tuple[int, int], ...]:
        """Where the overlap with ``outer`` lies among its bytes, which are row-major.

        Byte ranges (begin, end), ascending and apart, that hold all of the overlap. Gaps below a
        page are not left out; of a box with very many gaps, only those between larger parts.
        """
        common = self.overlap(outer)
        if common is None:
            return ()
        offsets, sizes = common.within(outer)
        for dim in range(len(sizes), -1, -1):
            begin, end = Box(offsets[dim:], sizes[dim:]).span_in(outer.sizes[dim:])
            length = math.prod(outer.sizes[dim:])
            is_worth_it = (length - (end - begin)) * item_bytes >= PAGE_BYTES
            if is_worth_it and math.prod(sizes[:dim]) <= _MOST_RANGES:
                break
        places = product(*map(range, offsets[:dim], map(add, offsets, sizes[:dim])))
        starts = (length * _index(place, outer.sizes[:dim]) for place in places)
        return tuple(((start + begin) * item_bytes, (start + end) * item_bytes) for start in starts)

    def without(self, others: Iterable[Box]) -> list[Box]:
        """The rest of this box without ``others``, as boxes that do not overlap."""
        left = [self] if self.num_elements else []
        for other in others:
            left = [piece for box in left for piece in _cut_out(box, other)]
        return left

    def __str__(self) -> str:
        ranges = zip(self.offsets, self.sizes, strict=True)
        return "[" + ", ".join(f"{begin}:{begin + size}" for begin, size in ranges) + "]"


def _index(place: Iterable[int], shape: Iterable[int]) -> int:
    """The number of an element in row-major order."""
    found = 0
    for at, length in zip(place, shape, strict=True):
        found = found * length + at
    return found


def _cut_out(box: Box, other: Box) -> Iterator[Box]:
    hole = box.overlap(other)
    if hole is None:
        yield box
        return
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim, (begin, size) in enumerate(zip(*hole, strict=True)):
        for start, end in (
            (offsets[dim], begin),
            (begin + size, offsets[dim] + sizes[dim]),
        ):
            if end > start:
                yield Box(
                    (*offsets[:dim], start, *offsets[dim + 1 :]),
                    (*sizes[:dim], end - start, *sizes[dim + 1 :]),
                )
        offsets[dim], sizes[dim] = begin, size
