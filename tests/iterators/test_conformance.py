"""Restored from every recorded state, at any layout, the rest is the same to the bit."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from torch.utils.data import DataLoader

from iterators import CFIterator, EpochOrder, Position, ResumableDataLoader
from iterators.cursor import expected_ledger
from iterators.testing import check_resumable, digest, walk
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


def ranks_at(world: int, batch: int, n: int, state: dict[str, Any] | None) -> list[CFIterator]:
    """All ranks of one layout, in one process, restored."""
    ranks = [
        CFIterator(
            ResumableDataLoader(
                Augmented(n),
                batch,
                shuffle=True,
                seed=4,
                rank=rank,
                world=world,
                collate_fn=list,
            )
        )
        for rank in range(world)
    ]
    for one in ranks if state else []:
        one.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def kill_and_resume(rng: random.Random, *, n: int, epochs: int) -> list[str]:
    """A digest per sample contributed, in global order, over kills and random layouts.

    At every kill the ranks' positions are merged, and the ledger must be that of the places
    behind them.
    """
    history: list[str] = []
    state: dict[str, Any] | None = None
    epoch = 0
    while epoch < epochs:
        ranks = ranks_at(rng.choice([1, 2, 3, 5]), rng.choice([1, 4, 7]), n, state)
        last_step = ranks[0].step + rng.randint(1, 9)
        for parts in zip(*(one.steps(last_step) for one in ranks), strict=True):
            history.extend(in_global_order(ranks, list(parts)))
        first, *others = [Position.from_dict(one.state_dict()) for one in ranks]
        merged = first.merged(*others)
        epoch, state = merged.epoch, merged.to_dict()
        assert merged.ledger == expected_ledger(EpochOrder(n, 4, epoch), merged.position)
    return history


def in_global_order(ranks: list[CFIterator], parts: list[list[Any]]) -> list[str]:
    """The samples of one global batch, rank ``r``'s ``j``-th at place ``r + W * j``; no pads."""
    kept: list[tuple[int, str]] = []
    for rank, (iterator, part) in enumerate(zip(ranks, parts, strict=True)):
        weights = iterator.last_weights
        assert weights is not None
        kept += [
            (rank + len(ranks) * index, digest(sample))
            for index, sample in enumerate(part)
            if weights[index]
        ]
    return [content for _, content in sorted(kept)]


@pytest.mark.parametrize("trial", range(12))
def test_kills_and_changes_of_layout_do_not_change_the_history(trial: int) -> None:
    n, epochs = [1, 3, 23, 40][trial % 4], 3
    history = kill_and_resume(random.Random(trial), n=n, epochs=epochs)
    (single,) = ranks_at(1, 5, n, None)
    served = [digest(one) for _ in single.epochs(13) for part in single for one in part]
    assert len(history) >= epochs * n
    assert history == served[: len(history)]
