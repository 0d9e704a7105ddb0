"""Which bytes of a saved shard hold what a rank needs of it, and how few they are."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from checkfreq.store.boxes import Box
from checkfreq.types import PAGE_BYTES
from tests.store.geometry import elements

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


@given(overlapping())
def test_ranges_hold_every_element_and_end_with_needed_ones(case: tuple[Box, Box, int]) -> None:
    box, outer, item_bytes = case
    ranges = box.byte_ranges_in(outer, item_bytes)
    numbers = {place: number for number, place in enumerate(elements(outer))}
    needed = {number for place, number in numbers.items() if place in elements(box)}
    held = {place for b, e in ranges for place in range(b // item_bytes, e // item_bytes)}
    assert needed <= held
    for begin, end in ranges:
        assert {begin // item_bytes, end // item_bytes - 1} <= needed
    for (_, end), (begin, _) in itertools.pairwise(ranges):
        assert begin - end >= PAGE
    if item_bytes == PAGE:
        assert held == needed


def test_of_very_many_gaps_only_those_between_larger_parts_are_left_out() -> None:
    outer, half = Box((0, 0, 0), (3, 5000, 8)), Box((0, 0, 0), (3, 2500, 4))
    plane, part = 5000 * 8 * PAGE, (2499 * 8 + 4) * PAGE
    expected = tuple((n * plane, n * plane + part) for n in range(3))
    assert half.byte_ranges_in(outer, PAGE) == expected
