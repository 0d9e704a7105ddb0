"""Makes any rank of any layout, as ``check_elastic`` and ``check_lives`` ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from iterators import CFIterator, ResumableDataLoader
from iterators.testing import MakeRank
from tests.iterators.datasets import Augmented


def rank_of(
    n: int,
    *,
    kind: Callable[..., CFIterator] = CFIterator,
    accumulate: int | None = None,
    **settings: Any,
) -> MakeRank:
    """Shuffled, over ``n`` samples with random augmentation."""

    def make(rank: int, world: int, batch: int) -> CFIterator:
        loader = ResumableDataLoader(
            Augmented(n),
            batch,
            rank=rank,
            world=world,
            **{"shuffle": True, "seed": 4, "collate_fn": list, **settings},
        )
        return kind(loader, accumulate=accumulate)

    return make
