"""Restored from every recorded state, at any layout, the rest is the same to the bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch.utils.data import DataLoader

from iterators import CFIterator, ResumableDataLoader
from iterators.testing import MakeRank, check_elastic, check_resumable, walk
from tests.iterators.datasets import Augmented, ByBatch


def rebuilt(n: int, batch: int, **settings: Any) -> CFIterator:
    return CFIterator(DataLoader(Augmented(n), batch, **settings), seed=9)


SIZES = [(1, 1), (1, 4), (3, 4), (8, 4), (9, 4), (10, 3), (13, 1)]
WITH_TAIL = [(n, batch, False) for n, batch in SIZES]
WITHOUT = [(n, batch, True) for n, batch in SIZES if n >= batch]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("n", "batch", "drop_last"), WITH_TAIL + WITHOUT)
def test_every_state_resumes_exactly_in_process(
    n: int, batch: int, drop_last: bool, shuffle: bool
) -> None:
    tried = check_resumable(
        lambda: rebuilt(n, batch, shuffle=shuffle, drop_last=drop_last), epochs=3
    )
    assert tried == 3 * len(rebuilt(n, batch, drop_last=drop_last)) + 1


@pytest.mark.parametrize("persistent", [False, True])
def test_every_state_resumes_exactly_with_workers(persistent: bool) -> None:
    check_resumable(
        lambda: rebuilt(10, 4, shuffle=True, num_workers=2, persistent_workers=persistent)
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize(("before", "after"), [(0, 4), (4, 0), (2, 0), (0, 1)])
def test_the_number_of_workers_may_change(before: int, after: int) -> None:
    check_resumable(
        lambda: rebuilt(10, 4, shuffle=True, num_workers=before),
        make_resumed=lambda: rebuilt(10, 4, shuffle=True, num_workers=after),
    )


def test_a_dataset_that_fetches_by_batch_resumes_exactly() -> None:
    check_resumable(lambda: CFIterator(ResumableDataLoader(ByBatch(10), 4, shuffle=True)))


def test_an_order_of_the_users_own_resumes_exactly() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return random.Random(seed + epoch).choices(range(10), k=14)

    check_resumable(lambda: CFIterator(ResumableDataLoader(Augmented(10), 4, order=order)))


@pytest.mark.parametrize("kept", ["order", "torch", "python", "numpy"])
def test_the_conformance_test_notices_what_is_not_resumed(kept: str) -> None:
    class Careless(CFIterator):
        def load_state_dict(self, state: Any, /) -> None:
            if kept != "order":
                super().load_state_dict(state)

    others = {"torch", "python", "numpy"} - {kept}

    def make() -> CFIterator:
        return Careless(ResumableDataLoader(Augmented(6), 2, shuffle=True, seeded=others))

    with pytest.raises(AssertionError, match=r"epoch|batches served"):
        check_resumable(make)


def test_epochs_differ_in_order_and_augmentation() -> None:
    served = walk(rebuilt(12, 12, shuffle=True), epochs=3)
    assert len({one.ids for one in served}) == 3
    assert len({one.digest for one in served}) == 3


def rank_of(n: int, **settings: Any) -> MakeRank:
    """Makes any rank of any layout, over ``n`` samples."""

    def make(rank: int, world: int, batch: int) -> CFIterator:
        loader = ResumableDataLoader(
            Augmented(n), batch, rank=rank, world=world, **{**ELASTIC, **settings}
        )
        return CFIterator(loader)

    return make


ELASTIC: dict[str, Any] = {"shuffle": True, "seed": 4, "collate_fn": list}


@pytest.mark.parametrize("trial", range(12))
def test_kills_and_changes_of_layout_do_not_change_the_history(trial: int) -> None:
    n = [1, 3, 23, 100][trial % 4]
    restarts = check_elastic(rank_of(n), epochs=3, seed=trial, most_served=5)
    assert restarts > 0 or n < 100


@pytest.mark.parametrize("trial", range(4))
def test_kills_do_not_change_what_comes_before_a_dropped_tail(trial: int) -> None:
    check_elastic(rank_of(50, tail="drop"), epochs=3, seed=trial, most_served=5)
