"""Tensors of one object that lie in the same memory, and how they are kept.

Tensors of the same bytes are one tensor under two names. Others that overlap are kept as views
(``composed.VIEW``) of all the memory that they span, so that they share it again after a restore.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from checkfreq.state.tensors import are_strides

#: Memory begins at a multiple of so many bytes of its storage, which every dtype divides.
_ALIGNMENT = 16


class Placed(NamedTuple):
    """A tensor and the addresses that it spans.

    ``number`` is the index of its ref, or that of a parameter, which is not kept here.
    """

    first: int
    end: int
    tensor: Tensor
    number: int
    is_parameter: bool = False


def placed(tensor: Tensor, number: int, *, is_parameter: bool = False) -> Placed:
    """Where a tensor with elements lies."""
    begin = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    end = begin + (last + 1) * tensor.element_size()
    return Placed(begin, end, tensor, number, is_parameter)


def overlapping(tensors: Iterable[Placed]) -> Iterator[list[Placed]]:
    """Groups of tensors whose spans overlap, by address; also single ones that overlap themselves.

    Spans of tensors with gaps may overlap although no element is in both.
    """
    group: list[Placed] = []
    end = 0
    for one in sorted(tensors, key=lambda one: (str(one.tensor.device), one.first)):
        if group and (one.first >= end or one.tensor.device != group[0].tensor.device):
            yield from _if_shared(group)
            group = []
        end = max(end, one.end) if group else one.end
        group.append(one)
    yield from _if_shared(group)


def _if_shared(group: list[Placed]) -> Iterator[list[Placed]]:
    if len(group) > 1 or (
        group and not are_strides([*group[0].tensor.stride()], group[0].tensor.shape)
    ):
        yield group


def memory_of(group: list[Placed]) -> Tensor | None:
    """All the bytes that a group spans; None if they are not in one storage as they are."""
    storage = group[0].tensor.untyped_storage()
    begin, end = group[0].first, max(one.end for one in group)
    for one in group:
        is_there = one.tensor.untyped_storage().data_ptr() == storage.data_ptr()
        if not is_there or one.tensor.is_neg():
            return None
    begin -= (begin - storage.data_ptr()) % _ALIGNMENT
    bare = torch.empty(0, dtype=torch.uint8, device=group[0].tensor.device)
    return bare.set_(storage, begin - storage.data_ptr(), (end - begin,), (1,))
