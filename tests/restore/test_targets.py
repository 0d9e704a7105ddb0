"""Bytes of a saved chunk arrive in a live tensor as ``copy_`` would have put them there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkfreq.restore.targets import wanted_of
from checkfreq.state.saved_tensor import Chunk, Placement, without_repeats
from checkfreq.store.boxes import Box
from checkfreq.store.manifest import FileEntry, TensorEntry
from tests.state.support import bits

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.complex128)


def chunk_of(shape: tuple[int, ...], dtype: torch.dtype) -> Chunk:
    name = str(dtype).removeprefix("torch.")
    num_bytes = Box.whole(shape).num_elements * dtype.itemsize
    entry = TensorEntry("t", name, shape, 4096, num_bytes, "0" * 16)
    file = FileEntry("f.safetensors", 4096 + num_bytes, 4096, "0" * 16, (entry,))
    return Chunk(Box.whole(shape), file, entry)


def values_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    data = torch.arange(Box.whole(shape).num_elements, dtype=torch.float64).reshape(shape)
    return (data % 251).to(dtype)


def data_of(values: Tensor) -> bytearray:
    return bytearray(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def deliver(placement: Placement, values: Tensor, cuts: list[int]) -> None:
    """Hand a chunk's bytes over in pieces, the last first, each in memory that is reused."""
    wanted, data = wanted_of(placement), data_of(values)
    assert wanted.target is not None
    ends = [0, *sorted({cut * values.element_size() for cut in cuts}), len(data)]
    for begin, end in reversed([*pairwise(ends)]):
        for first, last in wanted.ranges or ((0, len(data)),):
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                piece = data[start:stop]
                wait = wanted.target.put(start, memoryview(piece))
                if wait is not None:
                    wait()
                piece[:] = b"\xa5" * len(piece)


shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def live_tensors(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of that shape with any order of its dimensions, gaps, and repeated dimensions."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    room = torch.zeros([shape[d] * steps[d] + 1 for d in order], dtype=dtype)
    tensor = room.permute([order.index(d) for d in range(len(shape))])
    for dim, step in enumerate(steps):
        tensor = tensor.narrow(dim, draw(st.integers(0, 1)), shape[dim] * step)
        tensor = tensor[(*[slice(None)] * dim, slice(None, None, step))]
    for dim in range(len(shape)):
        if draw(st.integers(0, 9)) == 0:
            tensor = tensor.narrow(dim, 0, 1).expand(
                *tensor.shape[:dim], shape[dim], *tensor.shape[dim + 1 :]
            )
    return tensor


@settings(max_examples=40)
@given(data=st.data())
def test_any_part_of_a_chunk_arrives_in_a_tensor_of_any_strides(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    dtype = data.draw(st.sampled_from(DTYPES))
    values, chunk = values_of(shape, dtype), chunk_of(shape, dtype)
    begins = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(
        data.draw(st.integers(1, size - begin)) for begin, size in zip(begins, shape, strict=True)
    )
    part = Box(begins, sizes)
    live = data.draw(live_tensors(sizes, dtype))
    source = values
    for dim, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        source = source.narrow(dim, begin, size)
    target, repeated = without_repeats(live)
    for dim in repeated:
        source = source.narrow(dim, 0, 1)
        part = Box(part.offsets, (*part.sizes[:dim], 1, *part.sizes[dim + 1 :]))
    expected = source.expand(live.shape)
    cuts = data.draw(st.lists(st.integers(0, values.numel()), max_size=5))
    deliver(Placement(chunk, part, target), values, cuts)
    assert bits(torch.empty(sizes, dtype=dtype).copy_(live)) == bits(expected)


def test_a_share_of_each_of_some_large_matrices_is_read_without_the_rest_of_them() -> None:
    shape, item_bytes = (3, 8, 512), 4
    values, chunk = values_of(shape, torch.float32), chunk_of(shape, torch.float32)
    live = torch.zeros(3, 4, 512)
    placement = Placement(chunk, Box((0, 4, 0), (3, 4, 512)), live)
    half = 4 * 512 * item_bytes
    assert wanted_of(placement).ranges == tuple((n * half, (n + 1) * half) for n in (1, 3, 5))
    column = wanted_of(Placement(chunk, Box((0, 0, 3), (3, 8, 1)), torch.zeros(3, 8, 1)))
    assert column.ranges == ((3 * item_bytes, ((3 * 8 - 1) * 512 + 4) * item_bytes),)
    assert wanted_of(Placement(chunk, Box.whole(shape), values)).ranges is None
    deliver(placement, values, [1000, 5000])
    assert bits(live) == bits(values[:, 4:].contiguous())


@pytest.mark.parametrize("change", [torch.Tensor.bfloat16, torch.conj], ids=["cast", "conj"])
def test_values_and_not_bytes_arrive_in_a_tensor_of_another_kind(
    change: Callable[[Tensor], Tensor],
) -> None:
    dtype = torch.complex128 if change is torch.conj else torch.float32
    values = values_of((5, 3), dtype) * (1 + 2j if dtype.is_complex else 1)
    live = change(torch.zeros(5, 3, dtype=dtype))
    deliver(Placement(chunk_of((5, 3), dtype), Box.whole((5, 3)), live), values, [1, 7, 8])
    assert bits(live) == bits(values.to(live.dtype))
