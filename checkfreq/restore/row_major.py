"""Boxes of a tensor in row-major order: what a run of a saved chunk's elements is in a live one."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from checkfreq.store.boxes import Box


def parts_of(
    elements: Tensor, first: int, *, shape: tuple[int, ...], part: Box, target: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Where elements of a chunk of ``shape`` belong, as (part of the target, its values) pairs.

    ``elements`` `[N]` are those from number ``first`` on; ``target`` is the box ``part`` of the
    chunk, and what lies outside is left out.
    """
    for at, box in row_major_boxes(shape, first, first + elements.numel()):
        common = box.overlap(part) if box.sizes else box
        if common is not None:
            piece = elements[at - first : at - first + box.num_elements].view(box.sizes)
            yield _narrowed(target, common.within(part)), _narrowed(piece, common.within(box))


def row_major_boxes(shape: tuple[int, ...], first: int, end: int) -> Iterator[tuple[int, Box]]:
    """The elements from ``first`` up to ``end`` of a tensor as boxes, each with its first element.

    In row-major order, at most two boxes per dimension and one more.
    """
    if first >= end:
        return
    if not shape:
        yield first, Box((), ())
        return
    row = math.prod(shape[1:])
    from_row, skipped = divmod(first, row)
    to_row, rest = divmod(end, row)
    if skipped:
        stop = min(end, (from_row + 1) * row)
        yield from _in_row(shape, from_row, first, stop)
        from_row += 1
    if to_row > from_row:
        sizes = (to_row - from_row, *shape[1:])
        yield from_row * row, Box((from_row, *(0 for _ in shape[1:])), sizes)
    if rest and to_row >= from_row:
        yield from _in_row(shape, to_row, to_row * row, end)


def _in_row(shape: tuple[int, ...], row: int, first: int, end: int) -> Iterator[tuple[int, Box]]:
    base = row * math.prod(shape[1:])
    for at, box in row_major_boxes(shape[1:], first - base, end - base):
        yield base + at, Box((row, *box.offsets), (1, *box.sizes))


def _narrowed(tensor: Tensor, box: Box) -> Tensor:
    for dim, (begin, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor
