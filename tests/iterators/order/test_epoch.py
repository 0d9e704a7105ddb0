"""The order is a permutation, looks uniform, and never changes between versions."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iterators.order.epoch import EpochOrder, ListedOrder, SequentialOrder, fold64, fold64_each

# Written by version 1 on 2026-11-21. A change here breaks every saved position: add a version.
GOLDEN = [
    ((1, 0, 0), [0], 0),
    ((2, 0, 0), [0, 1], 1),
    ((5, 0, 0), [4, 3, 2, 1, 0], 0),
    ((7, 3, 1), [0, 3, 2, 6, 1, 4, 5], 5),
    ((10, 0, 0), [2, 9, 7, 3, 5, 8, 6, 0], 1),
    ((100, 42, 7), [90, 49, 57, 61, 53, 54, 9, 71], 12),
    ((300, 1, 0), [28, 230, 278, 202, 171, 14, 26, 201], 269),
    ((9999, 5, 2), [9265, 8544, 7072, 7412, 4591, 6223, 1489, 7357], 2189),
    ((10000, 5, 2), [6295, 4431, 6350, 2955, 4846, 9242, 6244, 1429], 7007),
    ((1281167, 0, 0), [893130, 589367, 1060589, 1243395, 218782, 680908], 157483),
    ((1281167, 0, 1), [1044267, 24752, 917257, 137667, 647411, 783229], 1025316),
    ((10**9, 2**64 - 1, 3), [90817262, 532446634, 306705998, 436026689], 550051229),
    ((10**13, 7, 89), [6700872241244, 220019938507, 1044171898596], 615419738731),
    ((2**62, 1, 0), [1527479693731869162, 4225848539190430252], 2007497612681986690),
]

sizes = st.one_of(st.integers(1, 400), st.integers(9_900, 10_100), st.integers(1, 2**62))
seeds = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 2**40)


@pytest.mark.parametrize(("key", "first", "last"), GOLDEN)
def test_the_order_of_version_1_never_changes(
    key: tuple[int, int, int], first: list[int], last: int
) -> None:
    order = EpochOrder(*key)
    assert order.algorithm == "feistel-1"
    assert order.ids(np.arange(len(first))).tolist() == first
    assert order.ids(order.n - 1).tolist() == [last]


@pytest.mark.parametrize("n", [*range(1, 34), 255, 256, 9_999, 10_000, 65_536])
def test_every_sample_has_exactly_one_place(n: int) -> None:
    order = EpochOrder(n, seed=3, epoch=5)
    ids = order.ids(np.arange(n))
    assert np.array_equal(np.sort(ids), np.arange(n))
    assert np.array_equal(order.positions(ids), np.arange(n))


@given(n=sizes, seed=seeds, epoch=epochs, data=st.data())
@settings(max_examples=100)
def test_positions_is_the_inverse_of_ids(
    n: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    order = EpochOrder(n, seed, epoch)
    ids = order.ids(places)
    assert [order.ids(place).item() for place in places] == ids.tolist()
    assert order.positions(ids).tolist() == places
    assert order.ids(order.positions(places)).tolist() == places


@pytest.mark.parametrize(("n", "part"), [(300, 0.0), (9_999, 0.34), (1_000_000, 0.999)])
def test_a_sample_lands_anywhere_with_equal_chance(n: int, part: float) -> None:
    bins, keys = 50, 1_000
    place = int(n * part)
    landed = [EpochOrder(n, seed, 0).ids(place).item() * bins // n for seed in range(keys)]
    assert _chi2(np.bincount(landed, minlength=bins)) < _limit(bins - 1)


@pytest.mark.parametrize("bad", [-1, 10, [0, 10]])
def test_places_outside_the_epoch_and_no_integers_are_refused(bad: object) -> None:
    for order in (
        EpochOrder(10, 0, 0),
        SequentialOrder(10),
        ListedOrder(range(10), num_samples=10),
    ):
        with pytest.raises(IndexError, match=r"expected values in \[0, 10\)"):
            order.ids(bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="expected integers"):
            order.ids([0.5])


@pytest.mark.parametrize(
    "key", [(0, 0, 0), (2**62 + 1, 0, 0), (5, -1, 0), (5, 2**64, 0), (5, 0, -1)]
)
def test_impossible_keys_are_refused(key: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        EpochOrder(*key)
    with pytest.raises(ValueError, match="order version 2 is unknown"):
        EpochOrder(5, 0, 0, version=2)


def test_a_listed_order_may_repeat_samples_but_not_invent_them() -> None:
    order = ListedOrder([2, 0, 2], num_samples=3)
    assert (order.algorithm, order.n) == ("listed-1", 3)
    assert order.ids([2, 1]).tolist() == [2, 0]
    with pytest.raises(IndexError, match="expected values in"):
        ListedOrder([3], num_samples=3)
    with pytest.raises(ValueError, match="flat, non-empty"):
        ListedOrder([], num_samples=3)


def _chi2(counts: np.ndarray) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def _limit(freedom: int) -> float:
    """Four standard deviations above the mean of chi squared; seeds are fixed, so no flakes."""
    return freedom + 4 * sqrt(2 * freedom) + 4


@given(
    numbers=st.lists(st.integers(0, 2**64 - 1), max_size=3), last=st.lists(st.integers(0, 2**62))
)
def test_hashes_of_many_are_those_of_each(numbers: list[int], last: list[int]) -> None:
    found = fold64_each(np.array(last, dtype=np.uint64), *numbers)
    assert found == [fold64(*numbers, one) for one in last]


def test_in_the_unshuffled_order_a_sample_stands_at_its_own_place() -> None:
    order = SequentialOrder(3)
    assert order.algorithm == "sequential-1"
    assert order.ids([2, 0]).tolist() == order.positions([2, 0]).tolist() == [2, 0]
