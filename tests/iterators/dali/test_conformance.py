"""Restored from every recorded state, at any layout, the pictures are the same to the bit."""

from __future__ import annotations

import random
from typing import Any

import pytest

from iterators import CFIterator
from iterators.dali import DALILoader
from iterators.testing import check_elastic, check_resumable, walk
from tests.iterators.dali.pipelines import built, resumable, samples, served

SIZES = [(1, 1), (1, 4), (3, 4), (8, 4), (9, 4), (10, 3), (40, 16)]
CASES = [(n, batch, "short") for n, batch in SIZES]
CASES += [(n, batch, "drop") for n, batch in SIZES if n >= batch]


@pytest.mark.parametrize(("n", "batch", "tail"), CASES)
def test_every_state_resumes_exactly(paths: list[str], n: int, batch: int, tail: str) -> None:
    whole = resumable(paths[:n], batch, tail=tail)
    tried = check_resumable(lambda: resumable(paths[:n], batch, tail=tail), epochs=2)
    assert tried == 2 * len(whole) + 1


def test_every_state_resumes_exactly_in_order(paths: list[str]) -> None:
    check_resumable(lambda: resumable(paths[:10], 4, shuffle=False))
    (first, *_) = walk(resumable(paths[:10], 4, shuffle=False), epochs=1)
    assert first.ids == (0, 1, 2, 3)


PIPELINES: list[dict[str, Any]] = [
    {"prefetch_queue_depth": 1},
    {"prefetch_queue_depth": 4},
    {"exec_dynamic": False},
    {"exec_dynamic": False, "prefetch_queue_depth": {"cpu_size": 3, "gpu_size": 2}},
    {"exec_dynamic": False, "exec_pipelined": False, "exec_async": False},
    {"enable_checkpointing": True},
    {"enable_conditionals": True},
]
ITERATORS: list[dict[str, Any]] = [
    {"auto_reset": True},
    {"prepare_first_batch": False},
    {"auto_reset": True, "prepare_first_batch": False},
]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_any_pipeline_resumes_exactly(paths: list[str], pipeline: dict[str, Any]) -> None:
    check_resumable(
        lambda: resumable(paths[:10], 4),
        make_resumed=lambda: resumable(paths[:10], 4, pipeline=pipeline),
    )


@pytest.mark.parametrize("iterator", ITERATORS, ids=str)
def test_any_iterator_resumes_exactly(paths: list[str], iterator: dict[str, Any]) -> None:
    check_resumable(
        lambda: resumable(paths[:10], 4),
        make_resumed=lambda: resumable(paths[:10], 4, iterator=iterator),
    )


@pytest.mark.parametrize("iterator", [{}, *ITERATORS], ids=str)
@pytest.mark.parametrize("pipeline", [{}, *PIPELINES[:5]], ids=str)
def test_one_iterator_is_entered_anywhere_any_number_of_times(
    paths: list[str], pipeline: dict[str, Any], iterator: dict[str, Any]
) -> None:
    """Forwards, backwards, left early or late, in other epochs, always without rebuilding."""
    rng, n, batch = random.Random(1), 23, 4
    once = DALILoader(built(paths[:n], batch, seed=9))
    expected = [served(once, epoch=epoch) for epoch in range(3)]
    loader = DALILoader(built(paths[:n], batch, seed=9, pipeline=pipeline, iterator=iterator))
    for _ in range(12):
        epoch, start, at_most = rng.randrange(3), rng.randrange(n + 1), rng.randrange(8)
        found = served(loader, epoch=epoch, start=start, at_most=at_most)
        assert found == expected[epoch][start : start + at_most * batch]


@pytest.mark.parametrize("trial", range(8))
def test_kills_and_changes_of_layout_do_not_change_the_pictures(
    paths: list[str], trial: int
) -> None:
    files = paths[: [1, 3, 23, 40][trial % 4]]

    def make(rank: int, world: int, batch: int) -> CFIterator:
        read = built(files, batch, shard_id=rank, num_shards=world, seed=4)
        return CFIterator(read, audit=True)

    check_elastic(
        make,
        epochs=2,
        seed=trial,
        worlds=(1, 2, 3, 4),
        batches=(1, 3, 8),
        most_served=5,
        samples_of=samples,
    )
