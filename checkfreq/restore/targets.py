"""From placements to what the engine reads: where the bytes of a saved chunk go in a live tensor.

A chunk's bytes come row by row. Elements that lie in a tensor's memory in the same order are
copied by address. Any other tensor is written by torch: one that is transposed, channels_last, a
column of a matrix, on a device, or of another dtype (where only what fits is restored).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from checkfreq.restore.buffers import MemoryTarget
from checkfreq.restore.reads import Target, Wanted
from checkfreq.state.saved_tensor import Placement
from checkfreq.state.tensors import DTYPES
from checkfreq.store.boxes import Box


def wanted_of(placement: Placement) -> Wanted:
    """What the engine must read to fill a placement."""
    chunk = placement.chunk
    first, end = _span(placement.part, chunk.box.sizes)
    item_bytes = DTYPES[chunk.entry.dtype].itemsize
    ranges = None
    if (first, end) != (0, chunk.box.num_elements):
        ranges = ((first * item_bytes, end * item_bytes),)
    return Wanted(chunk.file, chunk.entry, target_of(placement), ranges)


def target_of(placement: Placement) -> Target:
    """Where the bytes of the chunk go; it takes only bytes between the ends of the part."""
    chunk, part, target = placement
    shape, dtype = chunk.box.sizes, DTYPES[chunk.entry.dtype]
    first, end = _span(part, shape)
    if end - first != part.num_elements or target.dtype != dtype or not _is_row_major(target):
        return StridedTarget(target, part, shape, dtype)
    flat: Target = MemoryTarget(target.data_ptr(), target.nbytes, keep=target)
    return flat if first == 0 else _Shifted(flat, first * target.element_size())


def _is_row_major(target: Tensor) -> bool:
    plain = not target.is_conj() and not target.is_neg()
    return target.is_cpu and plain and target.is_contiguous()


def _span(part: Box, shape: Sequence[int]) -> tuple[int, int]:
    """The first element of a box in row-major order, and the one after its last."""
    first = last = 0
    for begin, size, length in zip(*part, shape, strict=True):
        first = first * length + begin
        last = last * length + begin + size - 1
    return first, last + 1


class _Shifted:
    """A target that begins at byte ``by`` of the chunk."""

    __slots__ = ("_by", "_target")

    def __init__(self, target: Target, by: int) -> None:
        self._target = target
        self._by = by

    def put(self, start: int, data: memoryview) -> None:
        """See Target; the copy is done on return."""
        wait = self._target.put(start - self._by, data)
        if wait is not None:
            wait()


class StridedTarget:
    """A tensor of any kind, for the box ``part`` of a chunk of ``shape`` and ``dtype``."""

    __slots__ = ("_dtype", "_part", "_shape", "_target")

    def __init__(self, target: Tensor, part: Box, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._target = target
        self._dtype = dtype
        self._part = part
        self._shape = tuple(shape)

    def put(self, start: int, data: memoryview) -> None:
        """See Target; the copy is done on return."""
        item_bytes = self._dtype.itemsize
        assert start % item_bytes == len(data) % item_bytes == 0, "a piece splits an element"
        writable = bytearray(data) if data.readonly else data  # torch warns of read-only memory
        elements = torch.frombuffer(writable, dtype=self._dtype)
        first = start // item_bytes
        for at, box in row_major_boxes(self._shape, first, first + elements.numel()):
            common = box.overlap(self._part) if box.sizes else box
            if common is not None:
                piece = elements[at - first : at - first + box.num_elements].view(box.sizes)
                target = _narrowed(self._target, common.within(self._part))
                target.copy_(_narrowed(piece, common.within(box)))


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
