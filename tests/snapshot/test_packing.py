"""Packing: where small tensors lie in one transfer, and how strided ones are divided."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.snapshot.engine import Copy
from checkfreq.snapshot.packing import (
    Packing,
    cut,
    grouped,
    row_major_pieces,
    target_and_source,
)


def copy(offset: int, tensor: torch.Tensor) -> Copy:
    return Copy(str(offset), tensor, offset, tensor.numel() * tensor.element_size(), True)


def test_neighbours_in_the_slot_are_one_run() -> None:
    copies = [copy(4112, torch.zeros(3)), copy(4096, torch.zeros(4)), copy(8192, torch.zeros(1))]
    packing = Packing.of(copies)
    assert [c.offset for c in packing.copies] == [4096, 4112, 8192]
    assert packing.begins == (0, 16, 64)
    assert [(r.slot_offset, r.begin, r.num_bytes) for r in packing.runs] == [
        (4096, 0, 28),
        (8192, 64, 4),
    ]
    assert packing.num_bytes == 68


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 4, 8, 16])), max_size=30))
def test_runs_cover_every_copy_aligned_and_without_overlap(
    gaps_and_sizes: list[tuple[int, int]],
) -> None:
    copies, end = [], 0
    dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    for gap, size in gaps_and_sizes:
        begin = -(-(end + gap) // size) * size
        copies.append(copy(begin, torch.zeros(gap % 3 + 1, dtype=dtypes[size])))
        end = begin + copies[-1].num_bytes
    packing = Packing.of(copies)
    assert sum(run.num_bytes for run in packing.runs) == sum(c.num_bytes for c in copies)
    for c, begin in zip(packing.copies, packing.begins, strict=True):
        assert begin % c.source.element_size() == 0
        assert any(
            run.begin <= begin and c.offset - run.slot_offset == begin - run.begin
            for run in packing.runs
        )
    ends = [0, *(run.begin + run.num_bytes for run in packing.runs)]
    assert all(run.begin >= end for run, end in zip(packing.runs, ends, strict=False))
    assert packing.num_bytes == max(ends)


@given(
    st.lists(st.integers(1, 5), max_size=4),
    st.randoms(use_true_random=False),
    st.integers(1, 300),
)
def test_pieces_are_bounded_and_in_row_major_order(
    shape: list[int], draw: object, limit: int
) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    order = list(range(tensor.dim()))
    draw.shuffle(order)  # type: ignore[attr-defined]
    strided = tensor.permute(order)
    pieces = list(row_major_pieces(strided, max(limit, 4)))
    assert all(piece.numel() * 4 <= max(limit, 4) for _, piece in pieces)
    assert [offset for offset, _ in pieces] == [
        sum(piece.numel() * 4 for _, piece in pieces[:n]) for n in range(len(pieces))
    ]
    flat = torch.cat([piece.reshape(-1) for _, piece in pieces])
    assert torch.equal(flat, strided.reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_bit_of_a_nan_survives(dtype: torch.dtype) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    odd = torch.tensor([-1, -2, 3], dtype=bits)  # quiet and signalling NaNs among them
    base = torch.zeros(odd.numel() * dtype.itemsize, dtype=torch.uint8)
    target, source = target_and_source(copy(0, odd.view(dtype)), base, 0)
    assert source.dtype in (bits, dtype)
    assert source.dtype not in (torch.float16, torch.bfloat16), "kernels compute in float32"
    target.copy_(source)
    assert torch.equal(base.view(bits), odd)


def test_groups_have_one_dtype_and_flat_contiguous_tensors() -> None:
    base = torch.zeros(400, dtype=torch.uint8)
    odd_strides = torch.zeros(4, 3, 1, 1).contiguous(memory_format=torch.channels_last)
    sources = [
        torch.zeros(2, 2),
        odd_strides,
        torch.zeros(()),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, 4).t(),
        torch.zeros(2, dtype=torch.complex128),
    ]
    begins = [0, 16, 64, 68, 76, 128]
    pairs = [target_and_source(copy(b, s), base, b) for b, s in zip(begins, sources, strict=True)]
    groups, others = grouped(pairs)
    assert [len(targets) for targets, _ in groups] == [3, 1]
    assert [source.dtype for _, source in others] == [torch.float32, torch.complex128]
    for targets, grouped_sources in groups:
        for target, source in zip(targets, grouped_sources, strict=True):
            assert target.dim() == 1
            assert (target.shape, target.stride()) == (source.shape, source.stride())
        torch._foreach_copy_(targets, grouped_sources)


@given(
    st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128]),
    st.integers(1, 300),
    st.integers(0, 100),
    st.sampled_from([16, 64, 4096]),
)
def test_a_copy_is_cut_into_all_of_itself_at_the_borders(
    dtype: torch.dtype, count: int, begin: int, piece_bytes: int
) -> None:
    size = dtype.itemsize
    slot = torch.zeros(8192, dtype=torch.uint8)
    at = begin * size
    target = slot[at : at + count * size].view(dtype)
    source = torch.arange(1.0, count + 1).to(dtype)
    end = at
    for to, of in cut(target, source, at=at, piece_bytes=piece_bytes):
        offset, num_bytes = to.data_ptr() - slot.data_ptr(), to.numel() * size
        assert offset == end, "in order and without gaps"
        assert offset // piece_bytes == (offset + num_bytes - 1) // piece_bytes
        end += num_bytes
        to.copy_(of)
    assert end == at + count * size
    assert torch.equal(target, source)


def test_a_copy_within_one_piece_is_left_as_it_is() -> None:
    """Also one that has a shape: only flat ones can be cut, and only they go to a slot."""
    target, source = torch.zeros(2, 3), torch.zeros(2, 3)
    ((to, of),) = cut(target, source, at=4096 - 24, piece_bytes=4096)
    assert to is target
    assert of is source
    with pytest.raises(AssertionError):
        cut(target, source, at=4096 - 4, piece_bytes=4096)
