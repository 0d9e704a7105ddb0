"""Shards that cover a tensor exactly, and shards that do not."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.store.boxes import Box
from checkfreq.store.cover import Placed, fault_of


def placed(rank: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Placed:
    return Placed(rank, Box(offsets, sizes))


def elements(one: Placed) -> list[tuple[int, ...]]:
    ranges = (range(o, o + s) for o, s in zip(*one.box, strict=True))
    return list(itertools.product(*ranges))


@st.composite
def some_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Placed]]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    boxes = []
    for rank in range(draw(st.integers(0, 6))):
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        sizes = tuple(
            draw(st.integers(0, size - start)) for size, start in zip(shape, offsets, strict=True)
        )
        boxes.append(placed(rank, offsets, sizes))
    return shape, boxes


@given(some_boxes())
def test_any_boxes_are_judged_as_counting_every_element_does(
    case: tuple[tuple[int, ...], list[Placed]],
) -> None:
    shape, boxes = case
    count = Counter(itertools.chain.from_iterable(map(elements, boxes)))
    overlapping = any(times > 1 for times in count.values())
    complete = len(count) == len(elements(placed(0, (0,) * len(shape), shape)))
    assert bool(fault_of(shape, boxes, whole=False)) is overlapping
    assert bool(fault_of(shape, boxes)) is (overlapping or not complete)


def test_boxes_that_no_straight_cut_separates_are_compared_one_by_one() -> None:
    windmill = [
        placed(0, (0, 0), (1, 2)),
        placed(1, (0, 2), (2, 1)),
        placed(2, (2, 1), (1, 2)),
        placed(3, (1, 0), (2, 1)),
        placed(4, (1, 1), (1, 1)),
    ]
    assert fault_of((3, 3), windmill) == ""
    windmill[4] = placed(4, (1, 1), (1, 2))
    assert fault_of((3, 3), windmill) == (
        "expected each element once, "
        "found [2, 1] at [0, 2] of rank 1 and [1, 2] at [1, 1] of rank 4"
    )


@pytest.mark.parametrize(
    "box",
    [
        placed(2, (5, 0), (2, 3)),
        placed(2, (0,), (6,)),
        placed(2, (0, 0), (6, 3, 1)),
        placed(2, (7, 0), (0, 3)),
    ],
)
def test_a_box_outside_the_tensor_is_named(box: Placed) -> None:
    assert fault_of((6, 3), [box]) == f"expected a box within [6, 3], found {box}"
    assert str(box).endswith("of rank 2")
