"""Boxes: intersections and differences."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from checkfreq.store.boxes import Box

SHAPE = (5, 4, 3)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    offsets = tuple(draw(st.integers(0, size)) for size in SHAPE)
    sizes = tuple(
        draw(st.integers(0, size - offset)) for size, offset in zip(SHAPE, offsets, strict=True)
    )
    return Box(offsets, sizes)


def elements(box: Box) -> set[tuple[int, ...]]:
    ranges = (range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return {*itertools.product(*ranges)}


@given(boxes(), boxes())
def test_an_overlap_has_the_elements_that_both_boxes_have(one: Box, other: Box) -> None:
    both = one.overlap(other)
    assert (set() if both is None else elements(both)) == elements(one) & elements(other)


@given(boxes(), st.lists(boxes(), max_size=4))
def test_the_rest_has_the_elements_of_no_other_box_each_once(box: Box, others: list[Box]) -> None:
    left = box.without(others)
    expected = elements(box).difference(*map(elements, others))
    assert sum(piece.num_elements for piece in left) == len(expected)
    assert set().union(*map(elements, left)) == expected


def test_a_box_lies_in_a_shape_of_as_many_dimensions_that_is_large_enough() -> None:
    assert Box((1, 0), (2, 3)).lies_in((3, 3))
    assert not Box((1, 0), (3, 3)).lies_in((3, 3))
    assert not Box((-1, 0), (1, 1)).lies_in((3, 3))
    assert not Box((0,), (1,)).lies_in((3, 3))


def test_a_box_may_be_a_whole_tensor_and_the_rest_of_it_surrounds_a_smaller_box() -> None:
    whole, scalar = Box.whole((4, 3)), Box.whole(())
    assert str(whole) == "[0:4, 0:3]"
    assert scalar.without([]) == [scalar] == [scalar.overlap(scalar)]
    inner = Box((1, 1), (2, 1))
    assert whole.is_whole((4, 3))
    assert not inner.is_whole((4, 3))
    assert whole.without([inner]) == [
        Box((0, 0), (1, 3)),
        Box((3, 0), (1, 3)),
        Box((1, 0), (2, 1)),
        Box((1, 2), (2, 1)),
    ]
    assert whole.without([Box((0, 0), (1, 3))]) == [Box((1, 0), (3, 3))]
