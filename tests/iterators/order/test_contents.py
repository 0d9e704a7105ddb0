"""Data that was split or shuffled otherwise is noticed; the same data made again never is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset, random_split

from iterators import CFIterator, ResumableDataLoader, ResumeMismatchError
from iterators.order.contents import sample_digests

N = 40


class Held(Dataset[Any]):
    """Samples that the dataset holds in an attribute."""

    def __init__(self, held: Any, length: int = N) -> None:
        self.held, self._length = held, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample may be asked for")


class Listed(Held):
    """A dataset that holds its order, as those of torch_geometric do."""

    def __init__(self, order: Any) -> None:
        super().__init__(None)
        self._indices = order


def order(seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(2 * N)[:N].tolist()


def values(seed: int) -> torch.Tensor:
    return torch.randn(2 * N, 5, generator=torch.Generator().manual_seed(1))[order(seed)]


@dataclass
class Example:
    """A sample, as many preprocessing scripts hold them."""

    text: str
    score: float


def split_of_stored(seed: int) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [f"line {n}" for n in range(2 * N)]})
    return rows.train_test_split(test_size=N, seed=seed)["train"]


SPLITS: dict[str, Callable[[int], Any]] = {
    "tensors": lambda seed: TensorDataset(values(seed), torch.arange(N)),
    "arrays": lambda seed: Held(values(seed).numpy()),
    "labels": lambda seed: Held([n % 3 for n in order(seed)]),
    "paths": lambda seed: Held([Path(f"/data/{n}.jpg") for n in order(seed)]),
    "pairs": lambda seed: Held([(f"/data/{n}.jpg", 0) for n in order(seed)]),
    "texts": lambda seed: Held(np.array([f"line {n}" for n in order(seed)])),
    "rows": lambda seed: [{"x": row} for row in values(seed)],
    "columns": lambda seed: Held({"ids": [[n, n + 1] for n in order(seed)], "mask": [[1, 1]] * N}),
    "inside": lambda seed: Held(ConcatDataset([TensorDataset(values(seed))])),
    "examples": lambda seed: Held([Example(f"line {n}", 0.5) for n in order(seed)]),
    "times": lambda seed: Held(np.array(order(seed), "datetime64[D]")),
    "complex": lambda seed: Held(torch.view_as_complex(values(seed)[:, :2].contiguous())),
    # The order is in the rows after a map.
    "stored": lambda seed: split_of_stored(seed).map(lambda row: {"length": len(row["text"])}),
    "inside a wrapper, stored": lambda seed: Held(split_of_stored(seed)),
}


def loaded(saved: Any, live: Any) -> None:
    state = CFIterator(DataLoader(saved, 4, shuffle=True), seed=1).state_dict()
    CFIterator(DataLoader(live, 4, shuffle=True), seed=1).load_state_dict(state)


@pytest.mark.parametrize("kind", SPLITS)
def test_another_split_is_warned_of_and_the_same_one_is_not(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(SPLITS[kind](1), SPLITS[kind](1))
    assert not caplog.messages
    loaded(SPLITS[kind](1), SPLITS[kind](2))
    (message,) = caplog.messages
    assert "split or shuffled without a seed" in message
    assert "other values in " in message


SAME: dict[str, Callable[[], tuple[Any, Any]]] = {
    "other last bits": lambda: (
        Held(torch.cat([values(1), torch.ones(N, 1), torch.zeros(N, 1)], 1)),
        Held(torch.cat([values(1), torch.ones(N, 1), torch.full((N, 1), 1e-9)], 1) * (1 + 2e-7)),
    ),
    "a moved folder": lambda: (
        Held([f"/job/1/{n}.jpg" for n in range(N)]),
        Held([f"/job/2/{n}.jpg" for n in range(N)]),
    ),
    "a cache that fills": lambda: (Held([None] * N), Held([b"seen"] * N)),
    "lists that fill": lambda: (Held([[] for _ in range(N)]), Held([[n] for n in range(N)])),
    "what is not of the samples": lambda: (Held([1, 2, 3]), Held([4, 5])),
}


@pytest.mark.parametrize("kind", SAME)
def test_what_may_differ_between_two_starts_with_the_same_data_is_not_warned_of(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(*SAME[kind]())
    assert not caplog.messages


def test_ranks_that_hold_samples_of_their_own_are_not_compared_with_one_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def iterator(rank: int) -> CFIterator:
        data = Held([n % (rank + 2) for n in range(N)])
        return CFIterator(ResumableDataLoader(data, 4, seed=1, rank=rank, world=2))

    merged = iterator(0).merged_state([iterator(rank).state_dict() for rank in (0, 1)])
    assert merged is not None
    iterator(1).load_state_dict(merged)
    assert not caplog.messages


def test_data_that_is_named_is_not_looked_at() -> None:
    class Named(Held):
        def data_fingerprint(self) -> str:
            return "points-1"

    assert sample_digests(Named(values(1))) == {}
    assert sample_digests(Held(values(1)), "points-1") == {}


ORDERS: dict[str, Callable[[int], Any]] = {
    "list": lambda seed: Listed(order(seed)),
    "tensor": lambda seed: Listed(torch.tensor(order(seed))),
    "random_split": lambda seed: random_split(
        Held(None), [0.5, 0.5], torch.Generator().manual_seed(seed)
    )[0],
    "datasets": lambda seed: split_of_stored(1).shuffle(seed=seed),
}


@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
def test_another_order_that_a_dataset_holds_is_refused(make: Callable[[int], Any]) -> None:
    loaded(make(1), make(1))
    with pytest.raises(ResumeMismatchError, match="split or shuffled without a seed"):
        loaded(make(1), make(2))
