"""Boxes: intersections and differences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkfreq.store.boxes import Box
from tests.store.geometry import boxes_of, elements

boxes = boxes_of((5, 4, 3))


@given(boxes, boxes)
def test_an_overlap_has_the_elements_that_both_boxes_have(one: Box, other: Box) -> None:
    both = one.overlap(other)
    expected = {*elements(one)} & {*elements(other)}
    assert (set() if both is None else {*elements(both)}) == expected


@given(boxes, st.lists(boxes, max_size=4))
def test_the_rest_has_the_elements_of_no_other_box_each_once(box: Box, others: list[Box]) -> None:
    left = box.without(others)
    expected = {*elements(box)}.difference(*map(elements, others))
    assert sum(piece.num_elements for piece in left) == len(expected)
    assert set().union(*map(elements, left)) == expected


def test_a_box_lies_in_a_shape_of_as_many_dimensions_that_is_large_enough() -> None:
    assert Box((1, 0), (2, 3)).lies_in((3, 3))
    assert not Box((1, 0), (3, 3)).lies_in((3, 3))
    assert not Box((-1, 0), (1, 1)).lies_in((3, 3))
    assert not Box((0,), (1,)).lies_in((3, 3))


def test_a_box_may_be_a_whole_tensor_or_a_scalar() -> None:
    whole, scalar = Box.whole((4, 3)), Box.whole(())
    assert str(whole) == "[0:4, 0:3]"
    assert whole.is_whole((4, 3))
    assert not Box((1, 1), (2, 1)).is_whole((4, 3))
    assert whole.without([Box((0, 0), (1, 3))]) == [Box((1, 0), (3, 3))]
    assert scalar.without([]) == [scalar] == [scalar.overlap(scalar)]
