"""The mean cost of checkpoints and its error, which is to be honest."""

from __future__ import annotations

import statistics
from random import Random

import pytest

from checkfreq.policy.checkpoint_cost import CheckpointCost
from checkfreq.policy.estimates import Estimate


def cost_of(*seconds: float) -> CheckpointCost:
    cost = CheckpointCost()
    for value in seconds:
        cost.add(value)
    return cost


def estimate_of(cost: CheckpointCost) -> Estimate:
    estimate = cost.value()
    assert estimate is not None
    return estimate


def mean_of(cost: CheckpointCost) -> float:
    return estimate_of(cost).mean


def test_one_extreme_value_in_ten_is_trimmed() -> None:
    assert mean_of(cost_of(*[1.0] * 5, 100.0, *[1.0] * 4)) == 1.0


def test_an_extreme_value_among_few_counts_as_four_medians() -> None:
    assert mean_of(cost_of(1.0, 1.0, 100.0)) == pytest.approx((1 + 1 + 4) / 3)
    assert mean_of(cost_of(1.0, 1.0, 4.0)) == pytest.approx(2.0)


def test_negative_noise_counts_but_the_mean_is_never_negative() -> None:
    assert mean_of(cost_of(-1.0, 3.0)) == 1.0
    assert mean_of(cost_of(-1.0)) == 0.0


@pytest.mark.parametrize("now", [10.0, 0.1])
def test_four_costs_beyond_all_earlier_ones_are_a_new_regime(now: float) -> None:
    assert mean_of(cost_of(*[1.0] * 10, *[now] * 3)) != now
    assert mean_of(cost_of(*[1.0] * 10, *[now] * 4)) == pytest.approx(now)


@pytest.mark.parametrize("now", [3.0, 0.0])
def test_costs_that_change_within_their_noise_are_followed_once_it_is_certain(now: float) -> None:
    chance = Random(1)
    cost = cost_of(*[chance.gauss(1.5, 1.0) for _ in range(400)])
    cost.value()
    for _ in range(150):
        cost.add(chance.gauss(now, 1.0))
        cost.value()
    assert len(cost) <= 170
    assert mean_of(cost) == pytest.approx(now, abs=0.4)


def test_equal_costs_of_a_long_run_are_all_kept() -> None:
    cost = cost_of(*[1.0] * 1100)  # more than are compared with at most
    assert mean_of(cost) == 1.0
    assert cost.num_compared(1100) == 1100


def test_without_a_change_few_costs_are_dropped() -> None:
    kept = []
    for seed in range(5):
        chance = Random(seed)
        cost = CheckpointCost()
        for _ in range(1000):
            cost.add(chance.gauss(1.0, 1.0))
            cost.value()
        kept.append(len(cost))
    assert statistics.median(kept) == 1000
