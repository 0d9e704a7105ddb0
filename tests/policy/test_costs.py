"""The costs of a run, and the cached profile behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkfreq.policy.costs import PROFILE_ITERATIONS, RunCosts
from checkfreq.policy.observations import Iteration, Measured
from checkfreq.policy.profile import Profile
from checkfreq.types import SnapshotPlace
from tests.policy import runs

HOST = SnapshotPlace.HOST
CACHED = replace(runs.CACHED, device_copy_s=0.125)
MEASURED = Measured(copy_s=0.25, persist_s=0.5, durable_s=0.75, state_bytes=2000)


def measured(
    cached: Profile | None = None,
    *,
    num_clean: int = PROFILE_ITERATIONS,
    num_checkpoints: int = 0,
    persist_s: float = 0.5,
    cost_s: float = 0.5,
) -> RunCosts:
    costs = RunCosts(cached)
    for _ in range(num_clean):
        costs.add_clean(Iteration(0, 1, overlap_s=0.5))
    for _ in range(num_checkpoints):
        costs.add_durable(replace(MEASURED, persist_s=persist_s))
        costs.add_cost(cost_s, stall_s=0.0)
    return costs


@pytest.mark.parametrize(("num_clean", "num_checkpoints"), [(1, 1), (10, 0)])
def test_a_profile_needs_two_iterations_and_a_checkpoint(
    num_clean: int, num_checkpoints: int
) -> None:
    costs = measured(num_clean=num_clean, num_checkpoints=num_checkpoints)
    assert costs.profile(HOST) is None


def test_a_profile_is_what_was_measured() -> None:
    assert measured(num_checkpoints=1).profile(HOST) == Profile(
        iteration_s=1.0,
        overlap_s=0.5,
        host_copy_s=0.25,
        persist_s=0.5,
        durable_s=0.75,
        cost_s=0.5,
        cost_upper_s=0.5 + 1.645 * 0.25,
        state_bytes=2000,
    )


def test_a_cached_profile_stands_in_for_all_that_is_unknown() -> None:
    costs = RunCosts(CACHED)
    assert (costs.iteration_s, costs.short_iteration_s) == (1.0, 1.0)
    profile = costs.profile(HOST)
    assert profile is not None
    assert profile.cost_upper_s == pytest.approx(CACHED.cost_upper_s)
    assert replace(profile, cost_upper_s=CACHED.cost_upper_s) == CACHED


@pytest.mark.parametrize(("num", "part"), [(1, 1 / 8), (7, 7 / 8), (20, 1)])
def test_a_cached_cost_fades_evenly_until_there_are_eight(num: int, part: float) -> None:
    costs = measured(CACHED, num_checkpoints=num, cost_s=0.9)
    assert costs.check_cached() is None
    assert cost_s(costs) == pytest.approx(part * 0.9 + (1 - part) * CACHED.cost_s)


@pytest.mark.parametrize(("cost_s", "is_kept"), [(0.24, False), (0.26, True), (5.0, True)])
def test_one_cost_shows_that_a_cached_one_was_too_high_but_not_that_it_was_too_low(
    cost_s: float, is_kept: bool
) -> None:
    costs = measured(CACHED, num_checkpoints=1, cost_s=cost_s)
    assert (costs.check_cached() is None) == is_kept


def test_a_cached_cost_of_another_place_says_nothing_once_there_is_one_of_this() -> None:
    costs = measured(replace(CACHED, place=SnapshotPlace.DEVICE), num_checkpoints=1, cost_s=0.9)
    assert cost_s(costs) == 0.9
    profile = costs.profile(SnapshotPlace.DEVICE)
    assert profile is not None
    assert profile.cost_s < 0.6


def test_two_costs_that_are_noise_do_not_condemn_a_cached_profile_but_more_do() -> None:
    costs = measured(CACHED)
    for found_s in (0.2, 2.2):  # 1.2 on average, but anything from 0.2 to 2.2
        costs.add_cost(found_s, stall_s=0.0)
    assert costs.check_cached() is None
    for found_s in (1.4, 1.5, 1.3, 1.4):
        costs.add_cost(found_s, stall_s=0.0)
    assert costs.check_cached() == "cost_s is 1.33 here and 0.5 in the cached profile"


def cost_s(costs: RunCosts) -> float:
    profile = costs.profile(HOST)
    assert profile is not None
    return profile.cost_s


@pytest.mark.parametrize(
    ("cached", "reason"),
    [
        (replace(CACHED, iteration_s=1.24), None),
        (replace(CACHED, iteration_s=1.26), "iteration_s is 1 here and 1.26 in the cached profile"),
        (replace(CACHED, iteration_s=0.79), "iteration_s is 1 here and 0.79 in the cached profile"),
        (replace(CACHED, cost_s=0.2), "cost_s is 0.5 here and 0.2 in the cached profile"),
        (replace(CACHED, persist_s=1.1), "persist_s is 0.5 here and 1.1 in the cached profile"),
    ],
)
def test_a_cached_profile_is_dropped_if_it_is_off(cached: Profile, reason: str | None) -> None:
    assert measured(cached, num_checkpoints=2).check_cached() == reason


def test_a_cached_cost_is_compared_with_what_training_was_held_for_if_that_is_more() -> None:
    costs = measured(replace(CACHED, cost_s=0.2))
    for _ in range(2):
        costs.add_cost(0.15, stall_s=0.45)
    assert costs.check_cached() == "cost_s is 0.45 here and 0.2 in the cached profile"
    fits = measured(replace(CACHED, cost_s=0.5))
    for _ in range(2):
        fits.add_cost(0.0, stall_s=0.45)
    assert fits.check_cached() is None
