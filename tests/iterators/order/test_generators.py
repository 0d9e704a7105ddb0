"""Private generators are found wherever the code that makes samples reaches them, and seeded."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from iterators import CFIterator
from iterators.order.batch_requests import Seeding
from iterators.order.generators import PrivateGenerators
from iterators.testing import check_resumable

MODULE_RNG = np.random.default_rng()

KINDS: dict[str, Callable[[], Any]] = {
    "numpy.random.default_rng()": np.random.default_rng,
    "numpy.random.Generator(MT19937())": lambda: np.random.Generator(np.random.MT19937()),
    "numpy.random.RandomState()": np.random.RandomState,
    "random.Random()": random.Random,
    "torch.Generator()": torch.Generator,
}


def drawn_from(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random())


class Jitter:
    """A transform with a generator of its own, in a slot."""

    __slots__ = ("rng",)

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, value: float) -> float:
        return value + drawn_from(self.rng)


class Transformed(Dataset[float]):
    def __init__(self, *transforms: Callable[[float], float], n: int = 7) -> None:
        self.n, self.transforms = n, transforms

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> float:
        value = float(index)
        for one in self.transforms:
            value = one(value)
        return value


class ByBatch(Transformed):
    def __getitems__(self, indices: list[int]) -> list[float]:
        return [self[index] for index in indices]


class MadeLate(Transformed):
    """Makes its generator for the first sample, as those do that wait for the worker's seed."""

    rng: random.Random | None = None

    def __getitem__(self, index: int) -> float:
        self.rng = self.rng or random.Random()
        return index + self.rng.random()


def with_module_rng(value: float) -> float:
    return value + MODULE_RNG.random()


def with_closure() -> Callable[[float], float]:
    rng = np.random.default_rng()
    return lambda value: value + rng.random()


def with_bound_method() -> Callable[[float], float]:
    draw = random.Random().random

    def add(value: float, draw: Callable[[], float] = draw) -> float:
        return value + draw()

    return add


PLACES: dict[str, Callable[[], Dataset[float]]] = {
    "several transforms": lambda: Transformed(*(Jitter(kind()) for kind in KINDS.values())),
    "a global of the module": lambda: Transformed(with_module_rng),
    "a closure": lambda: Transformed(with_closure()),
    "a default argument": lambda: Transformed(with_bound_method()),
    "a partial function": lambda: Transformed(functools.partial(Jitter(random.Random()))),
    "datasets inside others": lambda: ConcatDataset(
        [Subset(Transformed(Jitter(random.Random())), [0, 2, 4]), Transformed(with_closure())]
    ),
    "batches": lambda: ByBatch(Jitter(np.random.default_rng())),
    "a sample": MadeLate,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_generator_is_seeded_for_each_sample_wherever_it_is_kept(place: str) -> None:
    def make(workers: int = 0) -> CFIterator:
        loader = DataLoader(PLACES[place](), 3, shuffle=True, num_workers=workers)
        return CFIterator(loader, seed=1)

    check_resumable(make)
    if place == "several transforms":  # workers draw what the training process draws
        check_resumable(make, make_resumed=lambda: make(2), epochs=1)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_seeded_and_two_of_them_differ(kind: str) -> None:
    pair = [KINDS[kind]() for _ in range(2)]
    private = PrivateGenerators(Seeding(1), dataset=pair)
    private.look()

    def draw(key: int) -> list[float]:
        private.set(key)
        return [drawn_from(one) for one in pair for _ in range(3)]

    first, other = draw(1 << 63), draw(5)
    assert draw(1 << 63) == first
    assert len({*first, *other}) == 12


def test_a_collate_function_of_its_own_generator_is_repeated() -> None:
    def make() -> CFIterator:
        rng = np.random.default_rng()
        collate: Any = lambda samples: (samples, rng.random())  # noqa: E731
        return CFIterator(DataLoader(Transformed(), 3, shuffle=True, collate_fn=collate), seed=1)

    check_resumable(make)


def test_what_is_not_seeded_or_global_or_a_proxy_is_not_looked_for() -> None:
    class Lazy:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("loaded")

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("loaded")

    draw = (random.sample, np.random.permutation, torch.default_generator)
    held = [Lazy(), Jitter(draw), Jitter(np.random.default_rng(3)), random.Random()]
    private = PrivateGenerators(Seeding(1, numpy=False), dataset=held)
    private.look()
    private.set(5)
    assert sorted(private.found) == ["dataset[2].rng", "dataset[3]"]
    assert held[2].rng.random() == np.random.default_rng(3).random()


def test_a_generator_that_cannot_be_seeded_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        CFIterator(DataLoader(Transformed(Jitter(random.SystemRandom()))))
    (said,) = caplog.messages
    assert "dataset.transforms[0].rng is a SystemRandom, which cannot be seeded" in said
    assert "Write numpy.random.default_rng() there" in said


# Iterable datasets


class Shuffled(IterableDataset[float]):
    """Shuffles by a generator of its own before it splits, and augments by the same one."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def __iter__(self) -> Iterator[float]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = self.rng.permutation(10)[first::step]
        return (int(index) + self.rng.random() for index in order)


class Counted(IterableDataset[float]):
    """A stream whose state is its place alone."""

    def __init__(self) -> None:
        self.rng, self.place = np.random.default_rng(), 0

    def __iter__(self) -> Iterator[float]:
        while self.place < 12:
            self.place += 1
            yield self.rng.random()

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def noised(samples: list[float]) -> tuple[list[float], float]:
    return samples, float(MODULE_RNG.random())


def test_a_stream_without_a_state_draws_the_same_again() -> None:
    def make() -> CFIterator:
        return CFIterator(DataLoader(Shuffled(), 2, num_workers=2, collate_fn=noised), seed=1)

    check_resumable(make, epochs=1)
    served = sorted(int(one) for samples, _ in make() for one in samples)
    assert served == list(range(10))


def test_a_stream_whose_state_forgets_its_generator_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        list(CFIterator(DataLoader(Counted(), 2), seed=1))
    (said,) = caplog.messages
    assert said.startswith("Counted draws from dataset.rng, and its state_dict() does not hold")
