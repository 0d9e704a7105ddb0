"""The checks of ``iterators.testing`` pass for what resumes, and notice what does not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from iterators import CFIterator, Ledger, Position, ResumableDataLoader
from iterators.testing import Life, MakeRank, check_lives, check_resumable
from tests.iterators.datasets import Augmented
from tests.iterators.ranks import rank_of


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


class Stuck(CFIterator):
    """Saves where it began."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.kept = super().state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self.kept


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


def alone(rank: int, world: int, batch: int) -> CFIterator:
    return rank_of(20)(0, 1, batch)


def without_ids(rank: int, world: int, batch: int) -> CFIterator:
    return CFIterator([[1], [2]], exact=False)


BROKEN: list[tuple[MakeRank, str]] = [
    (rank_of(20, kind=moved(1)), "epoch 0, place 6, world 1, batch 4: sample"),
    (rank_of(20, kind=Stuck), "place 0 of epoch 0, but boundaries cover"),
    (rank_of(20, kind=Uncounted), "place 6 of epoch 0, but its ledger"),
    (rank_of(20, seeded=()), "epoch 0, place 0, world 2, batch 3: sample [0-9]+ has different"),
    (alone, "epoch 0, place 1, world 2, batch 3: sample"),
    (without_ids, "does not say which samples"),
]


@pytest.mark.parametrize(("make", "reason"), BROKEN)
def test_the_elastic_check_notices_what_is_broken(make: MakeRank, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        check_lives(make, [Life(2, 3, 2), Life(1, 4)])
