"""Restored from every recorded state, at any layout, the pictures are the same to the bit."""

from __future__ import annotations

import random
from typing import Any

import pytest

from iterators import CFIterator
from iterators.dali import DALILoader
from iterators.testing import check_elastic, check_resumable, walk
from tests.iterators.dali.pipelines import built, resumable, samples, served


@pytest.mark.parametrize(
    ("n", "batch", "tail", "shuffle"),
    [(1, 4, "short", False), (9, 4, "short", True), (10, 3, "drop", False)],
)
def test_every_state_resumes_exactly(
    paths: list[str], n: int, batch: int, tail: str, shuffle: bool
) -> None:
    whole = resumable(paths[:n], batch, tail=tail, shuffle=shuffle)
    tried = check_resumable(
        lambda: resumable(paths[:n], batch, tail=tail, shuffle=shuffle), epochs=2
    )
    assert tried == 2 * len(whole) + 1
    (first, *_) = walk(whole, epochs=1)
    assert shuffle or first.ids == tuple(range(min(n, batch)))


#: Of the pipeline, and of the iterator over it.
BUILT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"prefetch_queue_depth": 1}, {"auto_reset": True}),
    ({"prefetch_queue_depth": 4}, {"prepare_first_batch": False}),
    (
        {"exec_dynamic": False, "prefetch_queue_depth": {"cpu_size": 3, "gpu_size": 2}},
        {"auto_reset": True, "prepare_first_batch": False},
    ),
    ({"exec_dynamic": False, "exec_pipelined": False, "exec_async": False}, {}),
]


def test_a_pipeline_with_checkpoints_and_conditionals_resumes_exactly(paths: list[str]) -> None:
    settings = {"enable_checkpointing": True, "enable_conditionals": True}
    check_resumable(
        lambda: resumable(paths[:7], 3),
        make_resumed=lambda: resumable(paths[:7], 3, pipeline=settings),
        epochs=1,
    )


@pytest.mark.parametrize(("pipeline", "iterator"), BUILT, ids=str)
def test_one_iterator_is_entered_anywhere_any_number_of_times(
    paths: list[str], pipeline: dict[str, Any], iterator: dict[str, Any]
) -> None:
    """Forwards, backwards, left early or late, in other epochs, always without rebuilding."""
    rng, n, batch = random.Random(1), 23, 4
    once = DALILoader(built(paths[:n], batch, seed=9))
    expected = [served(once, epoch=epoch) for epoch in range(3)]
    loader = DALILoader(built(paths[:n], batch, seed=9, pipeline=pipeline, iterator=iterator))
    for _ in range(8):
        epoch, start, at_most = rng.randrange(3), rng.randrange(n + 1), rng.randrange(8)
        found = served(loader, epoch=epoch, start=start, at_most=at_most)
        assert found == expected[epoch][start : start + at_most * batch]


@pytest.mark.parametrize("n", [3, 23])
def test_kills_and_changes_of_layout_do_not_change_the_pictures(paths: list[str], n: int) -> None:
    def make(rank: int, world: int, batch: int) -> CFIterator:
        read = built(paths[:n], batch, shard_id=rank, num_shards=world, seed=4)
        return CFIterator(read, audit=True)

    layouts = {"worlds": (1, 2, 3), "batches": (1, 3, 8)}
    check_elastic(make, seed=n, most_served=5, samples_of=samples, **layouts)  # type: ignore[arg-type]
