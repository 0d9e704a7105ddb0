"""Boxes: axis-aligned regions of a tensor (shards), as offsets and sizes. Pure; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple


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

    def without(self, others: Iterable[Box]) -> list[Box]:
        """The rest of this box without ``others``, as boxes that do not overlap."""
        left = [self] if self.num_elements else []
        for other in others:
            left = [piece for box in left for piece in _cut_out(box, other)]
        return left

    def __str__(self) -> str:
        ranges = zip(self.offsets, self.sizes, strict=True)
        return "[" + ", ".join(f"{begin}:{begin + size}" for begin, size in ranges) + "]"


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
