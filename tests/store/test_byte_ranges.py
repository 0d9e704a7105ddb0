"""Which bytes of a saved shard hold what a rank needs of it, and how few they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.store.boxes import Box
from checkfreq.store.digests import piece_bytes_of_shard, spans
from checkfreq.types import PAGE_BYTES, TensorSpec

PAGE = PAGE_BYTES


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[Box, Box, int]:
    """Two boxes of one tensor, and the size of an element: some up to a page, so that gaps are."""
    dims = draw(st.integers(0, 3))
    pairs = []
    for _ in range(2):
        offsets = tuple(draw(st.integers(0, 3)) for _ in range(dims))
        pairs.append(Box(offsets, tuple(draw(st.integers(0, 4)) for _ in range(dims))))
    return pairs[0], pairs[1], draw(st.sampled_from([1, 8, PAGE // 2, PAGE]))


def places_of(box: Box, outer: Box) -> set[int]:
    """The numbers of the overlap's elements, in row-major order of the outer box."""
    both = box.overlap(outer)
    if both is None:
        return set()
    offsets, sizes = both.within(outer)
    ranges = (range(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
    strides = [prod(outer.sizes[dim + 1 :]) for dim in range(len(outer.sizes))]
    places = itertools.product(*ranges)
    return {sum(at * by for at, by in zip(place, strides, strict=True)) for place in places}


@given(overlapping())
def test_ranges_hold_every_element_are_in_order_and_end_with_elements_that_are_needed(
    case: tuple[Box, Box, int],
) -> None:
    box, outer, item_bytes = case
    ranges = box.byte_ranges_in(outer, item_bytes)
    needed = places_of(box, outer)
    held = {place for b, e in ranges for place in range(b // item_bytes, e // item_bytes)}
    assert needed <= held
    for begin, end in ranges:
        assert {begin // item_bytes, end // item_bytes - 1} <= needed
    for (_, end), (begin, _) in itertools.pairwise(ranges):
        assert begin - end >= PAGE
    if item_bytes == PAGE:
        assert held == needed


def test_of_a_box_with_very_many_gaps_only_those_between_larger_parts_are_left_out() -> None:
    outer, item_bytes = Box((0, 0, 0), (3, 5000, 8)), PAGE
    half = Box((0, 0, 0), (3, 2500, 4))
    plane = 5000 * 8 * PAGE
    part = (2499 * 8 + 4) * PAGE
    expected = tuple((n * plane, n * plane + part) for n in range(3))
    assert half.byte_ranges_in(outer, item_bytes) == expected


def split(shape: Sequence[int], dim: int, ranks: int) -> list[Box]:
    """The shards of a tensor that is divided evenly along a dimension."""
    size = shape[dim] // ranks
    sizes = (*shape[:dim], size, *shape[dim + 1 :])
    return [
        Box((*(0 for _ in shape[:dim]), rank * size, *(0 for _ in shape[dim + 1 :])), sizes)
        for rank in range(ranks)
    ]


def bytes_read(need: Box, saved: Box, item_bytes: int) -> int:
    """Bytes of the pieces of a saved shard that a rank reads."""
    num_bytes = saved.num_elements * item_bytes
    cut = TensorSpec(
        "", "", saved.sizes, 0, num_bytes, piece_bytes_of_shard(saved.sizes, num_bytes)
    )
    ranges = need.byte_ranges_in(saved, item_bytes)
    return sum(
        end - begin
        for begin, end in spans(cut)
        if any(first < end and begin < last for first, last in ranges)
    )


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 4)])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((4096, 1024), 0),
        ((50304,), 0),
        ((96, 768, 3), 0),
        ((4, 2048, 512), 1),  # experts, of which each is divided
    ],
)
def test_ranks_of_another_number_read_each_byte_once_in_all(
    shape: tuple[int, ...], dim: int, before: int, after: int
) -> None:
    saved, live = split(shape, dim, before), split(shape, dim, after)
    read = sum(bytes_read(need, there, 4) for need in live for there in saved)
    assert read == 4 * prod(shape)
