"""Iterable datasets that are shared out unevenly and draw from every random generator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


def drawn(value: int) -> dict[str, Any]:
    return {
        "id": value,
        "torch": torch.rand(2),
        "python": random.random(),
        "numpy": np.random.rand(),
    }


class Opaque(IterableDataset[Any]):
    """Worker ``w`` serves ``shares[w]`` samples; which ones depends on the epoch and on a draw."""

    def __init__(self, shares: list[int]) -> None:
        self.shares = shares
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def share(self) -> tuple[int, int]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        assert info is None or info.num_workers == len(self.shares)
        return worker, self.shares[worker]

    def __iter__(self) -> Iterator[Any]:
        worker, count = self.share()
        start = random.randrange(1000)
        for index in range(count):
            yield drawn(1_000_000 * self.epoch + 1000 * worker + start + index)


class Stateful(Opaque):
    """The same with a state, which begins anew behind its end, as many such datasets do."""

    def __init__(self, shares: list[int]) -> None:
        super().__init__(shares)
        self.index = 0
        self.order = np.random.RandomState(1)

    def __iter__(self) -> Iterator[Any]:
        worker, count = self.share()
        while self.index < count:
            self.index += 1
            yield drawn(1_000_000 * self.epoch + 1000 * worker + self.order.randint(1000))
        self.index = 0

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index, "order": self.order.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index = state["index"]
        self.order.set_state(state["order"])


class Walk:
    """An iterator with a state of its own."""

    def __init__(self, base: int, count: int) -> None:
        self.base, self.count, self.index = base, count, 0
        self.order = np.random.RandomState(random.randrange(1000))

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.index == self.count:
            raise StopIteration
        self.index += 1
        return drawn(self.base + self.order.randint(1000))

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index, "order": self.order.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index = state["index"]
        self.order.set_state(state["order"])


class Walked(Opaque):
    """Has no state, but its iterator does."""

    def __iter__(self) -> Iterator[Any]:
        worker, count = self.share()
        return Walk(1_000_000 * self.epoch + 1000 * worker, count)


class OwnIterator(Opaque):
    """Is its own iterator, which begins anew in ``__iter__`` and has no state before."""

    def __iter__(self) -> Iterator[Any]:
        worker, count = self.share()
        self.walk = Walk(1_000_000 * self.epoch + 1000 * worker, count)
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self.walk)

    def state_dict(self) -> dict[str, Any]:
        return self.walk.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.walk.load_state_dict(state)


class Batched(Opaque):
    """Yields ready batches of its own sizes."""

    def __iter__(self) -> Iterator[Any]:
        worker, count = self.share()
        for index in range(count):
            yield torch.rand(1 + (worker + index) % 3)


class Sized(Opaque):
    """Says a length that is not its own."""

    def __init__(self, shares: list[int], claimed: int) -> None:
        super().__init__(shares)
        self.claimed = claimed

    def __len__(self) -> int:
        return self.claimed


class Squares(Dataset[int]):
    """Behind ``Indexed``."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index**2


class Indexed(IterableDataset[int]):
    """Names its map-style source."""

    def __iter__(self) -> Iterator[int]:
        return (Squares()[index] for index in range(10))

    def indexed_source(self) -> Squares:
        return Squares()


class Subscriptable(IterableDataset[int]):
    """Has an index, which its own order does not follow."""

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in reversed(range(10)))

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index**2


class SelfIndexed(Subscriptable):
    """Is its own map-style source."""

    def indexed_source(self) -> SelfIndexed:
        return self
