"""From placements to what the engine reads: where the bytes of a saved chunk go in a live tensor.

A chunk's bytes come row by row. Elements that lie in a tensor's memory in the same order are
copied by address. Any other tensor is written by torch: one that is transposed, channels_last, a
column of a matrix, or of another dtype (where only what fits is restored). Tensors on a device have
targets of their own (device_target.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from checkfreq.restore.buffers import MemoryTarget
from checkfreq.restore.device_target import DeviceTransfers
from checkfreq.restore.reads import Target, Wanted
from checkfreq.restore.row_major import parts_of
from checkfreq.state.saved_tensor import Placement
from checkfreq.state.tensors import DTYPES
from checkfreq.store.boxes import Box


def wanted_of(placement: Placement, transfers: DeviceTransfers | None = None) -> Wanted:
    """What the engine must read to fill a placement. ``transfers``: to targets on devices."""
    chunk = placement.chunk
    whole = Box.whole(chunk.box.sizes)
    ranges = None
    if placement.part != whole:
        ranges = placement.part.byte_ranges_in(whole, DTYPES[chunk.entry.dtype].itemsize)
    return Wanted(chunk.file, chunk.entry, target_of(placement, transfers), ranges)


def target_of(placement: Placement, transfers: DeviceTransfers | None = None) -> Target:
    """Where the bytes of the chunk go; it takes only bytes between the ends of the part."""
    chunk, part, target = placement
    shape, dtype = chunk.box.sizes, DTYPES[chunk.entry.dtype]
    if transfers is not None and transfers.reach(target):
        return transfers.target(target, part=part, shape=shape, dtype=dtype)
    first, end = part.span_in(shape)
    if end - first != part.num_elements or target.dtype != dtype or not _is_row_major(target):
        return StridedTarget(target, part, shape, dtype)
    begin = first * target.element_size()
    return MemoryTarget(target.data_ptr(), target.nbytes, begin=begin, keep=target)


def _is_row_major(target: Tensor) -> bool:
    plain = not target.is_conj() and not target.is_neg()
    return target.is_cpu and plain and target.is_contiguous()


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
        parts = parts_of(elements, first, shape=self._shape, part=self._part, target=self._target)
        for target, source in parts:
            target.copy_(source)
