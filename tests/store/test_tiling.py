"""One number per rank tells whether shards tile their tensors, as comparing all boxes does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.store.boxes import Box
from checkfreq.store.cover import Placed, fault_of
from checkfreq.store.tiling import Shard, add_up, measure
from tests.store.geometry import boxes_of

SHAPE = (4, 6)


def shards(*boxes: Box, shape: tuple[int, ...] = SHAPE, key: str = "w") -> list[Shard]:
    return [Shard("model", key, "float32", shape, box) for box in boxes]


def tile(*boxes: Box, shape: tuple[int, ...] = SHAPE) -> bool:
    parts = [measure([shard]) for shard in shards(*boxes, shape=shape)]
    return add_up(parts, measure([Shard.whole("model", "w", "float32", shape)]))


def split(box: Box, dim: int, at: int) -> tuple[Box, Box]:
    """The box in two, at so many elements along a dimension."""
    at = min(at, box.sizes[dim])
    first = (*box.sizes[:dim], at, *box.sizes[dim + 1 :])
    rest = (*box.sizes[:dim], box.sizes[dim] - at, *box.sizes[dim + 1 :])
    moved = (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :])
    return Box(box.offsets, first), Box(moved, rest)


@given(st.lists(boxes_of(SHAPE), max_size=5))
def test_random_boxes_tile_as_comparing_them_says(boxes: list[Box]) -> None:
    placed = [Placed(rank, box) for rank, box in enumerate(boxes)]
    assert tile(*boxes) == (fault_of(SHAPE, placed) == "")


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6)), max_size=8))
def test_whatever_is_cut_from_a_tensor_tiles_it_and_no_less(cuts: list[tuple[int, int]]) -> None:
    boxes = [Box.whole(SHAPE)]
    for number, (dim, at) in enumerate(cuts):
        boxes[number % len(boxes) : number % len(boxes) + 1] = split(
            boxes[number % len(boxes)], dim, at
        )
    assert tile(*boxes)
    filled = [box for box in boxes if box.num_elements]
    assert not tile(*filled[:-1])
    assert not tile(*filled, filled[-1])


@pytest.mark.parametrize(
    "other",
    [
        Shard("model", "w", "float16", SHAPE, Box((2, 0), (2, 6))),
        Shard("model", "w", "float32", (8, 6), Box((2, 0), (2, 6))),
        Shard("ema", "w", "float32", SHAPE, Box((2, 0), (2, 6))),
    ],
)
def test_ranks_that_say_something_else_of_a_tensor_do_not_add_up(other: Shard) -> None:
    top, bottom = split(Box.whole(SHAPE), 0, 2)
    whole = measure([Shard.whole("model", "w", "float32", SHAPE)])
    assert add_up([measure(shards(top)), measure(shards(bottom))], whole)
    assert not add_up([measure(shards(top)), measure([other])], whole)
