"""Restored from every recorded state, at any layout, the rest is the same to the bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from iterators import CFIterator, Ledger, Position, ResumableDataLoader
from iterators.testing import Life, MakeRank, check_elastic, check_lives, check_resumable, walk
from tests.iterators.datasets import Augmented, ByBatch
from tests.iterators.ranks import rank_of


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


@pytest.mark.parametrize("trial", range(12))
def test_kills_and_changes_of_layout_do_not_change_the_history(trial: int) -> None:
    n = [1, 3, 23, 100][trial % 4]
    restarts = check_elastic(rank_of(n), epochs=3, seed=trial, most_served=5)
    assert restarts > 0 or n < 100


@pytest.mark.parametrize("trial", range(4))
def test_kills_do_not_change_what_comes_before_a_dropped_tail(trial: int) -> None:
    check_elastic(rank_of(50, tail="drop"), epochs=3, seed=trial, most_served=5)


class Stuck(CFIterator):
    """Saves where it began."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.kept = super().state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self.kept


class Forgetful(CFIterator):
    """Ignores what it is to continue."""

    def load_state_dict(self, state: Any, /) -> None:
        pass


class Uncounted(CFIterator):
    """Saves a ledger of nothing, as if it were not merged."""

    def state_dict(self) -> dict[str, Any]:
        position = Position.from_dict(super().state_dict())
        return replace(position, ledger=Ledger()).to_dict()


def moved(places: int) -> type[CFIterator]:
    """Continues ``places`` behind the place it is to continue at."""

    class Moved(CFIterator):
        def load_state_dict(self, state: Any, /) -> None:
            position = Position.from_dict(state)
            there = replace(position, position=position.position + places)
            super().load_state_dict(there.to_dict())

    return Moved


def handed_out_counts(loader: ResumableDataLoader, **_: Any) -> CFIterator:
    return CFIterator(loader, marks_steps=False)


def reversed_ranks(rank: int, world: int, batch: int) -> CFIterator:
    return rank_of(20)(world - 1 - rank, world, batch)


def alone(rank: int, world: int, batch: int) -> CFIterator:
    return rank_of(20)(0, 1, batch)


def without_ids(rank: int, world: int, batch: int) -> CFIterator:
    return CFIterator([[1], [2]], exact=False)


BROKEN: list[tuple[MakeRank, str]] = [
    (rank_of(20, kind=moved(1)), "epoch 0, place 6, world 1, batch 4: sample"),
    (rank_of(20, kind=moved(-6)), "epoch 0, place 6, world 1, batch 4: sample"),
    (rank_of(20, kind=Forgetful), "epoch 0, place 6, world 1, batch 4: sample"),
    (rank_of(20, kind=Stuck), "place 0 of epoch 0, but boundaries cover"),
    (rank_of(20, kind=Uncounted), "place 6 of epoch 0, but its ledger"),
    (rank_of(20, kind=handed_out_counts), "place 12 of epoch 0, but boundaries cover"),
    (rank_of(20, seeded=()), "epoch 0, place 0, world 2, batch 3: sample [0-9]+ has different"),
    (reversed_ranks, "epoch 0, place 0, world 2, batch 3: sample"),
    (alone, "epoch 0, place 1, world 2, batch 3: sample"),
    (without_ids, "does not say which samples"),
]


@pytest.mark.parametrize(("make", "reason"), BROKEN)
def test_the_elastic_check_notices_what_is_broken(make: MakeRank, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        check_lives(make, [Life(2, 3, 2), Life(1, 4)])


def test_ranks_that_end_apart_are_noticed() -> None:
    def make(rank: int, world: int, batch: int) -> CFIterator:
        return rank_of(20, tail="drop" if rank else "short")(rank, world, batch)

    with pytest.raises(AssertionError, match=r"world 2, batch 3: only ranks \[1\] reached the end"):
        check_lives(make, [Life(2, 3)], epochs=1)


def test_lives_that_end_before_the_run_are_noticed() -> None:
    with pytest.raises(AssertionError, match="the lives end before 2 epochs were served"):
        check_lives(rank_of(20), [Life(2, 3, 2)])


def test_samples_that_do_not_fit_their_ids_are_noticed() -> None:
    with pytest.raises(AssertionError, match="2 samples, 1 ids, 1 weights"):
        check_lives(rank_of(20), [Life(2, 3)], samples_of=lambda batch: [*batch, *batch])


def test_a_batch_is_split_by_samples_of() -> None:
    def rows(batch: dict[str, Any]) -> list[Any]:
        return [
            {name: column[i] for name, column in batch.items()} for i in range(len(batch["id"]))
        ]

    check_elastic(rank_of(20, collate_fn=None), samples_of=rows)
