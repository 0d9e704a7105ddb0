"""``torch.set_default_device("cuda")`` changes neither what is served nor what is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from iterators import CFIterator

pytestmark = pytest.mark.gpu

DATA = list(range(20))


def listed(samples: list[int]) -> list[int]:
    """A ``collate_fn`` that makes no tensor."""
    return samples


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(DATA, 3, shuffle=True, collate_fn=listed),  # type: ignore[arg-type]
    "with workers": lambda: DataLoader(DATA, 3, num_workers=2, collate_fn=listed),  # type: ignore[arg-type]
    "drawn": lambda: DataLoader(
        DATA,  # type: ignore[arg-type]
        3,
        sampler=RandomSampler(DATA, replacement=True, num_samples=13),
        collate_fn=listed,
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_and_the_users_numbers_are_the_same(kind: str) -> None:
    expected = list(CFIterator(LOADERS[kind](), seed=7))
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    with torch.device("cuda"):
        found = list(CFIterator(LOADERS[kind](), seed=7))
    assert found == expected
    assert all(map(torch.equal, before, (torch.get_rng_state(), torch.cuda.get_rng_state())))
