"""Packing: where small tensors lie in one transfer, and how strided ones are divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from checkfreq.snapshot.engine import Copy
from checkfreq.snapshot.packing import (
    ALIGNMENT,
    Packed,
    Packing,
    chunked,
    cut,
    row_major_pieces,
    target_and_source,
)


def copy(offset: int, tensor: torch.Tensor) -> Copy:
    return Copy(str(offset), tensor, offset, tensor.numel() * tensor.element_size(), True)


def test_neighbours_in_the_slot_are_one_run() -> None:
    copies = [copy(4112, torch.zeros(3)), copy(4096, torch.zeros(4)), copy(8192, torch.zeros(1))]
    packing = Packing.of(copies)
    assert packing.numbers == (1, 0, 2)
    assert packing.begins == (0, 16, 32)
    assert [(r.slot_offset, r.begin, r.num_bytes) for r in packing.runs] == [
        (4096, 0, 28),
        (8192, 32, 4),
    ]
    assert packing.num_bytes == 36


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
    for number, begin in zip(packing.numbers, packing.begins, strict=True):
        c = copies[number]
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


def sources_of_every_kind() -> dict[str, torch.Tensor]:
    bits = torch.arange(-6, 6, dtype=torch.int16)
    return {
        "matrix": torch.randn(2, 3),
        "scalar": torch.tensor(3.0),
        "odd strides": torch.randn(4, 3).as_strided((4, 3, 1, 1), (3, 1, 3, 3)),
        "half": bits.view(torch.float16).view(3, 4),
        "int": torch.arange(5, dtype=torch.int32),
        "bool": torch.tensor([[True, False]]),
        "float8": bits.view(torch.uint8).view(torch.float8_e4m3fn),
        "turned": torch.randn(3, 4).t(),
        "turned half": bits.view(torch.bfloat16).view(3, 4).t(),
        "expanded": torch.randn(1, 4).expand(3, 4),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "neg": torch.randn(3, dtype=torch.complex64).conj().imag,
        "wide": torch.randn(2, dtype=torch.complex128),
    }


def copies_of(
    sources: Iterable[torch.Tensor], *, gap: int = 0, settled: Iterable[bool] = ()
) -> list[Copy]:
    """One after the other in a slot, from 4096 on, and aligned."""
    copies, end = [], 4096
    flags = iter(settled)
    for source in sources:
        size = source.element_size()
        begin = -(-(end + gap) // size) * size
        copies.append(copy(begin, source)._replace(settled=next(flags, True)))
        end = begin + copies[-1].num_bytes
    return copies


def put(packed: Packed, copies: list[Copy], slot: torch.Tensor, *, piece_bytes: int = 64) -> None:
    """Take the copies through the buffer to the slot, round by round."""
    for one in packed.rounds:
        packed.memory.fill_(0xEE)
        for group in (*one.volatile, *one.settled):
            sources = group.sources(copies)
            if group.is_alike:
                torch._foreach_copy_(group.targets, sources)
                continue
            for target, source in zip(group.targets, sources, strict=True):
                target.copy_(source)
        for target, source in chunked(one, slot, 48, piece_bytes=piece_bytes):
            target.copy_(source)


def same_bits(slot: torch.Tensor, copies: list[Copy]) -> bool:
    for one in copies:
        plain = one.source.resolve_conj().resolve_neg().contiguous().view(-1)
        there = slot[one.offset : one.offset + one.num_bytes]
        if not torch.equal(there, plain.view(torch.uint8)):
            return False
    return True


@given(
    st.lists(st.sampled_from(sorted(sources_of_every_kind())), min_size=1, max_size=24),
    st.lists(st.booleans(), max_size=24),
    st.integers(0, 40),
    st.sampled_from([96 + ALIGNMENT, 200, 4096]),
)
def test_every_bit_goes_through_the_buffer_in_as_many_rounds_as_it_takes(
    names: list[str], settled: list[bool], gap: int, capacity: int
) -> None:
    sources = sources_of_every_kind()
    copies = copies_of([sources[name] for name in names], gap=gap, settled=settled)
    packed = Packed(copies, torch.zeros(capacity, dtype=torch.uint8))
    slot = torch.zeros(8192, dtype=torch.uint8)
    put(packed, copies, slot)
    assert same_bits(slot, copies)
    numbers = [
        number
        for one in packed.rounds
        for group in (*one.volatile, *one.settled)
        for number in group.numbers
    ]
    assert sorted(numbers) == [*range(len(copies))], "each once"
    early, late = packed.by_stream()
    assert (*early, *late) == packed.rounds
    assert early
    assert not any(one.volatile for one in late)
    assert all(one.settled and not one.volatile for one in late)
    assert len(early) == 1 or early[-1].volatile, "no more than the volatile ones need"


def test_what_fits_is_one_round_with_few_runs_and_one_group_of_each_dtype() -> None:
    kinds = sources_of_every_kind()
    sources = [kinds[name] for name in ("matrix", "scalar", "int", "half", "bool", "float8")] * 9
    copies = copies_of(sorted(sources, key=lambda source: -source.element_size()))
    num_bytes = sum(one.num_bytes for one in copies)
    (only,) = Packed(copies, torch.zeros(num_bytes, dtype=torch.uint8)).rounds
    assert [(run.slot_offset, run.num_bytes) for run in only.runs] == [(4096, num_bytes)]
    found = {group.targets[0].dtype: group for group in only.settled}
    assert len(found) == 4
    assert {*found} == {torch.float32, torch.int32, torch.int16, torch.uint8}
    for group in only.settled:
        assert group.is_alike
        for target, source in zip(group.targets, group.sources(copies), strict=True):
            assert target.dtype is source.dtype
            assert (target.shape, target.stride()) == (source.shape, source.stride())


def test_strides_that_only_look_different_are_viewed_flat_and_others_copied_singly() -> None:
    kinds = sources_of_every_kind()
    names = ("matrix", "odd strides", "turned", "conj", "neg", "wide")
    copies = copies_of([kinds[name] for name in names], gap=16)
    (only,) = Packed(copies, torch.zeros(4096, dtype=torch.uint8)).rounds
    alike = {n: group for group in only.settled if group.is_alike for n in group.numbers}
    assert [names[n] for n in alike] == ["matrix", "odd strides"]
    assert [group.is_flat for group in alike.values()] == [False, True]


def test_a_plan_holds_no_source() -> None:
    source = torch.randn(3, 4)
    copies = copies_of([source, source.t(), source.bfloat16()])
    packed = Packed(copies, torch.zeros(4096, dtype=torch.uint8))
    put(packed, copies, torch.zeros(8192, dtype=torch.uint8))
    stored = [StorageWeakRef(one.source.untyped_storage()) for one in copies]
    assert not any(storage.expired() for storage in stored)
    del source, copies
    assert all(storage.expired() for storage in stored)
    assert packed.rounds


@pytest.mark.parametrize(
    "change",
    [
        lambda source: source.t().contiguous().t(),
        lambda source: source.view(torch.int64),
        lambda source: source.view(4, 3),
        lambda source: torch._neg_view(source),
        lambda source: source.conj(),
        lambda source: torch.view_as_real(source).view(6, 4),
    ],
    ids=["strides", "dtype", "shape", "negative", "conjugate", "real"],
)
def test_a_plan_does_not_fit_a_source_of_another_form(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    source = torch.randn(3, 4, dtype=torch.complex64)
    copies = copies_of([source, torch.zeros(2)])
    packed = Packed(copies, torch.zeros(4096, dtype=torch.uint8))
    assert packed.fits(copies_of([source.clone(), torch.ones(2)]))
    changed = change(source)
    assert changed.nbytes == source.nbytes
    assert not packed.fits([copies[0]._replace(source=changed), copies[1]])


def test_a_plan_does_not_fit_copies_that_go_elsewhere() -> None:
    copies = copies_of([torch.zeros(2), torch.zeros(2)])
    packed = Packed(copies, torch.zeros(4096, dtype=torch.uint8))
    assert not packed.fits(copies[:1])
    assert not packed.fits([copies[0], copies[1]._replace(offset=8192)])
    assert not packed.fits([copies[0], copies[1]._replace(settled=False)])


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
