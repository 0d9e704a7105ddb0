"""Shards that cover a tensor exactly, and shards that do not."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.store.boxes import Box
from checkfreq.store.cover import Placed, fault_of
from tests.store.geometry import boxes_of, elements


def placed(rank: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Placed:
    return Placed(rank, Box(offsets, sizes))


@given(
    st.lists(st.integers(0, 4), max_size=3)
    .map(tuple)
    .flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes_of(shape), max_size=6)))
)
def test_any_boxes_are_judged_as_by_counting(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    count = Counter(itertools.chain.from_iterable(map(elements, boxes)))
    overlapping = any(times > 1 for times in count.values())
    complete = len(count) == len(elements(Box.whole(shape)))
    held = [Placed(rank, box) for rank, box in enumerate(boxes)]
    assert bool(fault_of(shape, held, whole=False)) is overlapping
    assert bool(fault_of(shape, held)) is (overlapping or not complete)


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
    ],
)
def test_a_box_outside_the_tensor_is_named(box: Placed) -> None:
    assert fault_of((6, 3), [box]) == f"expected a box within [6, 3], found {box}"
    assert str(box).endswith("of rank 2")
