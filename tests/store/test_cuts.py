"""The index of cuts names every rank whose shard overlaps a box, and stays small on meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.store.boxes import Box
from checkfreq.store.checks import ManifestError
from checkfreq.store.cuts import Cut, CutIndex, cuts_of
from tests.store.geometry import boxes_of

Held = Mapping[int, Sequence[tuple[tuple[int, ...], Box]]]

SHAPES = ((4, 6), (6, 4), (4, 6, 2), (6,))


def index_of(held: Held) -> CutIndex:
    return CutIndex.of({rank: cuts_of(shards) for rank, shards in held.items()})


def through_json(index: CutIndex, ranks: Sequence[int]) -> CutIndex:
    value: Any = [
        [list(map(list, dims)), [list(map(_lists, run)) for run in runs]]
        for dims, runs in index.to_json()
    ]
    return CutIndex.from_json(value, ranks=ranks)


def _lists(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def rows(num_rows: int, world: int, *, width: int = 8) -> Held:
    """Rows over ranks, as ``torch.chunk`` spreads them."""
    size = -(-num_rows // world)
    found = {}
    for rank in range(world):
        begin = min(rank * size, num_rows)
        box = Box((begin, 0), (min(size, num_rows - begin), width))
        found[rank] = [((num_rows, width), box)]
    return found


def shards() -> st.SearchStrategy[tuple[tuple[int, ...], Box]]:
    return st.sampled_from(SHAPES).flatmap(lambda shape: st.tuples(st.just(shape), boxes_of(shape)))


@given(st.dictionaries(st.integers(0, 20), st.lists(shards(), max_size=4), max_size=8), shards())
def test_no_rank_that_overlaps_is_missed(held: Held, wanted: tuple[tuple[int, ...], Box]) -> None:
    shape, box = wanted
    expected = {
        rank
        for rank, own in held.items()
        for theirs, shard in own
        if theirs == shape and shard.num_elements and shard.overlap(box) is not None
    }
    index = index_of(held)
    assert index.ranks(shape, box) >= expected
    assert through_json(index, [*held]).ranks(shape, box) == index.ranks(shape, box)


@pytest.mark.parametrize("num_rows", [4096, 5000])
def test_rows_over_many_ranks_make_two_runs_at_most(num_rows: int) -> None:
    index = index_of(rows(num_rows, 4096))
    assert sum(map(len, index.runs.values())) <= 2


def test_a_rank_with_two_shards_of_a_size_is_in_two_runs() -> None:
    held = {
        rank: [((64,), Box((4 * rank,), (4,))), ((64,), Box((60 - 4 * rank,), (4,)))]
        for rank in range(4)
    }
    index = index_of(held)
    assert sum(map(len, index.runs.values())) == 2
    assert index.ranks((64,), Box((4,), (4,))) == {1}
    assert index.ranks((64,), Box((48,), (8,))) == {2, 3}


DIMS = [[0, 40]]


@pytest.mark.parametrize(
    "value",
    [
        {},
        [[DIMS]],
        [[DIMS, [[0, 1, 1, [0], [0]]]]],
        [[DIMS, [[0, 1, 1, [0, 0], [0], [4]]]]],
        [[DIMS, [[0, 0, 1, [0], [0], [4]]]]],
        [[DIMS, [[0, 1, 3, [0], [4], [4]]]]],  # ranks that have no record
        [[DIMS, [[0, 1, 1, [-1], [0], [4]]]]],
        [[DIMS, [[0, 1, 1, [0], [0.5], [4]]]]],
        [[[[1, 40], [0, 40]], []]],
        [[[[0, True]], []]],
        [[DIMS, []], [DIMS, []]],
    ],
)
def test_an_index_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ManifestError):
        CutIndex.from_json(value, ranks={0, 1})


@pytest.mark.parametrize("value", [None, [DIMS, [0], [4, 4]], [DIMS, [0], ["4"]]])
def test_a_cut_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ManifestError):
        Cut.from_json(value)
