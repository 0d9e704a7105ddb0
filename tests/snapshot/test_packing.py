"""Packing: where small tensors lie in one transfer, and how strided ones are divided."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.snapshot.engine import Copy
from checkfreq.snapshot.packing import (
    ALIGNMENT,
    Packed,
    chunked,
)
from tests.snapshot.recorder import row_major_bytes


def copy(offset: int, tensor: torch.Tensor) -> Copy:
    return Copy(str(offset), tensor, offset, tensor.numel() * tensor.element_size(), True)


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
    image = bytes(slot.tolist())
    return all(
        image[one.offset : one.offset + one.num_bytes] == row_major_bytes(one.source)
        for one in copies
    )


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
