"""Samplers whose indices are drawn again, to enter an epoch in the middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from iterators import CFIterator, ResumeMismatchError
from iterators.testing import check_resumable
from iterators.torch.drawn import DrawnOrder
from tests.iterators.datasets import Augmented, Plain

DATA = Augmented(20)


class Renamed(WeightedRandomSampler):
    pass


SAMPLERS: dict[str, Callable[[], Sampler[int]]] = {
    "weighted": lambda: WeightedRandomSampler(torch.arange(20.0), 13),
    "weighted, without replacement": lambda: Renamed(torch.ones(20), 13, replacement=False),
    "subset": lambda: SubsetRandomSampler(list(range(3, 16))),
    "with replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=33),
    "more": lambda: RandomSampler(DATA, num_samples=43),
    "the first ones, in order": lambda: SequentialSampler(range(13)),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_every_state_resumes_exactly_with_the_indices_that_torch_draws(kind: str) -> None:
    check_resumable(lambda: CFIterator(DataLoader(DATA, 8, sampler=SAMPLERS[kind]()), seed=5))
    order = DrawnOrder(SAMPLERS[kind](), 20, seed=5, epoch=1)
    sampler: Any = SAMPLERS[kind]()
    sampler.generator = torch.Generator().manual_seed(order._seed)
    assert order.ids(range(order.n)).tolist() == list(sampler)


def test_any_places_in_any_order_are_those_of_the_epoch() -> None:
    def make() -> DrawnOrder:
        data = range(50_000)
        return DrawnOrder(RandomSampler(data, num_samples=40_000), 50_000, seed=1, epoch=0)

    whole, order = make().ids(range(40_000)), make()
    for places in (range(0, 9_000, 3), range(30_000, 39_000), [2], [39_999, 5], []):
        assert order.ids(places).tolist() == whole[list(places)].tolist()
    with pytest.raises(IndexError, match="expected places in"):
        order.ids([40_000])


def test_global_generators_and_those_of_the_sampler_are_left_alone() -> None:
    own = torch.Generator().manual_seed(3)
    loader = DataLoader(DATA, 4, sampler=SubsetRandomSampler([1, 2, 3], generator=own))
    before = torch.get_rng_state(), own.get_state()
    list(CFIterator(loader))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(own.get_state(), before[1])


def test_other_weights_are_another_order_and_not_resumed() -> None:
    def make(*weights: float) -> CFIterator:
        return CFIterator(DataLoader(Plain(3), sampler=WeightedRandomSampler(weights, 3)), seed=1)

    with pytest.raises(ResumeMismatchError, match="WeightedRandomSampler"):
        make(1, 2, 3).load_state_dict(make(1, 2, 4).state_dict())


def test_weights_that_change_between_epochs_are_used_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampler = WeightedRandomSampler([1.0, 0.0], 4)
    iterator = CFIterator(DataLoader(Plain(2), 4, sampler=sampler))
    epochs = []
    for epoch in iterator.epochs(3):
        epochs += [one.tolist() for one in iterator]
        sampler.weights = torch.tensor([0.0, 1.0 + epoch])
    assert epochs == [[0] * 4, [1] * 4, [1] * 4]
    (said,) = caplog.messages
    assert said.startswith("WeightedRandomSampler was changed after CFIterator took it")


def test_samples_that_the_dataset_does_not_have_are_refused() -> None:
    with pytest.raises(IndexError, match="SubsetRandomSampler draws samples that a dataset of 3"):
        list(CFIterator(DataLoader(Plain(3), sampler=SubsetRandomSampler([1, 7]))))
