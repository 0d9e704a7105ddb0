"""The costs of a run, and the cached profile behind them."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import stdev

import pytest

from checkfreq.policy.charges import Baseline
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


def test_nothing_is_known_at_first() -> None:
    costs = RunCosts(None)
    assert costs.iteration_s is costs.short_iteration_s is costs.durable_s is costs.cost is None
    assert (costs.copy_s, costs.num_clean) == (0.0, 0)
    assert costs.profile(HOST) is None
    assert costs.check_cached() is None


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


def test_the_time_of_a_device_copy_is_known_once_there_was_one() -> None:
    costs = measured(num_checkpoints=1)
    costs.add_durable(replace(MEASURED, device_copy_s=0.0))
    profile = costs.profile(SnapshotPlace.DEVICE)
    assert profile is not None
    assert (profile.device_copy_s, profile.place) == (0.0, SnapshotPlace.DEVICE)


def test_an_iteration_without_an_overlap_window_tells_its_time_all_the_same() -> None:
    costs = RunCosts(None)
    costs.add_clean(Iteration(0, 2))
    assert costs.iteration_s == costs.short_iteration_s == 2.0


def test_a_cost_is_never_taken_for_less_than_training_was_held() -> None:
    costs = measured()
    costs.add_cost(-0.3, stall_s=0.2)
    profile = costs.profile(HOST)
    assert profile is not None
    assert profile.cost_s == profile.cost_upper_s == 0.2


def test_the_last_estimate_serves_after_costs_were_forgotten() -> None:
    costs = measured(num_checkpoints=3)
    before = costs.profile(HOST)
    costs.forget_costs()
    assert costs.profile(HOST) == before
    costs.add_cost(4.0, stall_s=0.0)
    assert costs.cost is not None
    assert costs.cost.mean == 4.0


def test_a_cached_profile_stands_in_for_all_that_is_unknown() -> None:
    costs = RunCosts(CACHED)
    assert (costs.iteration_s, costs.short_iteration_s) == (1.0, 1.0)
    profile = costs.profile(HOST)
    assert profile is not None
    assert profile.cost_upper_s == pytest.approx(CACHED.cost_upper_s)
    assert replace(profile, cost_upper_s=CACHED.cost_upper_s) == CACHED


def test_what_was_measured_takes_the_place_of_what_was_cached() -> None:
    costs = measured(CACHED, num_clean=3, num_checkpoints=8, cost_s=0.25)
    profile = costs.profile(HOST)
    assert profile is not None
    assert (profile.cost_s, profile.state_bytes, profile.iteration_s) == (0.25, 2000, 1.0)


@pytest.mark.parametrize(("num", "part"), [(1, 1 / 8), (2, 2 / 8), (7, 7 / 8), (8, 1), (20, 1)])
def test_a_cached_cost_fades_evenly_until_there_are_eight(num: int, part: float) -> None:
    costs = measured(CACHED, num_checkpoints=num, cost_s=0.9)
    assert costs.check_cached() is None
    assert cost_s(costs) == pytest.approx(part * 0.9 + (1 - part) * CACHED.cost_s)


def test_a_cached_cost_that_is_wrong_fades_at_once() -> None:
    costs = measured(CACHED, num_checkpoints=2, cost_s=1.1)
    assert costs.check_cached() == "cost_s is 1.1 here and 0.5 in the cached profile"
    assert cost_s(costs) == 1.1


@pytest.mark.parametrize(
    ("cost_s", "is_kept"), [(0.1, False), (0.24, False), (0.26, True), (0.5, True), (5.0, True)]
)
def test_one_cost_shows_that_a_cached_one_was_too_high_but_not_that_it_was_too_low(
    cost_s: float, is_kept: bool
) -> None:
    costs = measured(CACHED, num_checkpoints=1, cost_s=cost_s)
    assert (costs.check_cached() is None) == is_kept


def test_one_persist_shows_that_a_cached_one_was_too_long() -> None:
    costs = measured(replace(CACHED, persist_s=1.5), num_checkpoints=1, cost_s=0.5)
    assert costs.check_cached() == "persist_s is 0.5 here and 1.5 in the cached profile"


def test_one_cost_that_noise_may_have_made_low_does_not_condemn_a_cached_one() -> None:
    costs = RunCosts(CACHED)
    for at in range(64):
        costs.add_clean(Iteration(0.0, 0.7 if at % 2 else 1.3))
    costs.update_time()
    costs.add_durable(MEASURED)
    costs.add_cost(0.1, stall_s=0.0, num_touched=2.0)
    assert costs.check_cached() is None


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


def test_a_cached_cost_that_has_faded_is_not_compared_any_more() -> None:
    costs = measured(CACHED)
    for found_s in (1.7, 0.1) * 4:  # between a half and twice 0.5, but not for sure
        costs.add_cost(found_s, stall_s=0.0)
        assert costs.check_cached() is None
    for _ in range(20):
        costs.add_cost(9.0, stall_s=0.0)
    assert costs.check_cached() is None
    assert cost_s(costs) == 9.0


def test_a_cached_cost_counts_again_where_costs_of_another_place_were_forgotten() -> None:
    costs = measured(replace(CACHED, place=SnapshotPlace.DEVICE), num_checkpoints=8, cost_s=0.9)
    costs.forget_costs()
    profile = costs.profile(SnapshotPlace.DEVICE)
    assert profile is not None
    assert profile.cost_s == CACHED.cost_s


def noisy(costs: RunCosts, *, pairs: int, clean: int = 8, cost_s: float = 0.5) -> Profile:
    """So many checkpoints with ``clean`` noisy iterations in front of each."""
    for _ in range(pairs):
        for end_s in (0.9, 1.1) * (clean // 2):
            costs.add_clean(Iteration(0, end_s))
        costs.update_time()
        costs.add_cost(cost_s, stall_s=0.0, num_touched=4.0)
    profile = costs.profile(HOST)
    assert profile is not None
    return profile


def test_unpaired_the_error_of_the_iteration_time_is_in_all_costs_alike() -> None:
    costs = RunCosts(paired=False)
    errors = [noisy(costs, pairs=1, clean=16).cost_error_s]
    for _ in range(20):
        costs.add_cost(0.5, stall_s=0.0, num_touched=4.0)
    profile = costs.profile(HOST)
    assert profile is not None
    time_error_s = stdev([0.9, 1.1] * 8) / 4
    assert [*errors, profile.cost_error_s] == [pytest.approx(4 * time_error_s)] * 2


def test_the_error_falls_with_pairs_and_with_what_they_were_compared_with() -> None:
    few = noisy(RunCosts(), pairs=50).cost_error_s
    assert noisy(RunCosts(), pairs=200).cost_error_s == pytest.approx(few / 2, rel=0.1)
    assert noisy(RunCosts(), pairs=50, clean=32).cost_error_s < 0.7 * few


def test_what_noise_hides_is_taken_for_what_is_believed_until_there_is_more() -> None:
    """Of four iterations of a second 2 % are believed: 0.08 s."""
    assert 0.08 < noisy(RunCosts(), pairs=1, cost_s=3.0).cost_s < 1.0
    assert noisy(RunCosts(), pairs=500, cost_s=3.0).cost_s > 2.8
    assert cost_s(measured(num_checkpoints=1, cost_s=3.0)) == 3.0  # there is no noise


def cost_s(costs: RunCosts) -> float:
    profile = costs.profile(HOST)
    assert profile is not None
    return profile.cost_s


@pytest.mark.parametrize(
    ("cached", "reason"),
    [
        (replace(CACHED, iteration_s=1.24), None),
        (replace(CACHED, iteration_s=0.81), None),
        (replace(CACHED, iteration_s=1.26), "iteration_s is 1 here and 1.26 in the cached profile"),
        (replace(CACHED, iteration_s=0.79), "iteration_s is 1 here and 0.79 in the cached profile"),
        (replace(CACHED, cost_s=0.2), "cost_s is 0.5 here and 0.2 in the cached profile"),
        (replace(CACHED, persist_s=1.1), "persist_s is 0.5 here and 1.1 in the cached profile"),
    ],
)
def test_a_cached_profile_is_dropped_if_it_is_off(cached: Profile, reason: str | None) -> None:
    assert measured(cached, num_checkpoints=2).check_cached() == reason


def test_a_discarded_profile_no_longer_stands_in_for_anything() -> None:
    costs = measured(replace(CACHED, iteration_s=9.0))
    assert costs.check_cached() is not None
    assert costs.profile(HOST) is None
    assert costs.check_cached() is None


@pytest.mark.parametrize(("num_clean", "num_checkpoints"), [(9, 1), (0, 0)])
def test_it_is_not_compared_too_early(num_clean: int, num_checkpoints: int) -> None:
    cached = replace(CACHED, iteration_s=9.0, cost_s=0.01, persist_s=0.01)
    costs = measured(cached, num_clean=num_clean, num_checkpoints=num_checkpoints)
    assert costs.check_cached() is None


def test_what_changes_after_the_check_is_no_fault_of_the_cached_profile() -> None:
    costs = measured(CACHED, num_checkpoints=2)
    assert costs.check_cached() is None
    for _ in range(9):
        costs.add_durable(replace(MEASURED, persist_s=50.0))
        costs.add_cost(50.0, stall_s=0.0)
    assert costs.check_cached() is None


def test_a_cached_cost_is_compared_with_what_training_was_held_for_if_that_is_more() -> None:
    costs = measured(replace(CACHED, cost_s=0.2))
    for _ in range(2):
        costs.add_cost(0.15, stall_s=0.45)
    assert costs.check_cached() == "cost_s is 0.45 here and 0.2 in the cached profile"
    fits = measured(replace(CACHED, cost_s=0.5))
    for _ in range(2):
        fits.add_cost(0.0, stall_s=0.45)
    assert fits.check_cached() is None


def test_the_iteration_time_is_without_what_its_boundary_cost_or_the_user_waited() -> None:
    costs = measured(num_clean=0)
    for stall_s in (0.0, 0.25, 0.5) * 4:
        costs.add_clean(Iteration(0, 11 + stall_s, stall_s=stall_s, waited_s=10.0))
    costs.add_cost(0.5, stall_s=0.0)
    profile = costs.profile(HOST)
    assert profile is not None
    assert (profile.iteration_s, profile.boundary_s) == (1.0, 0.25)


def test_the_baseline_is_unknown_then_cached_then_measured() -> None:
    assert RunCosts(None).baseline is None
    costs = RunCosts(CACHED)
    assert costs.baseline == Baseline(1.0, 1.0, 4.0)
    for end_s in (2.0,) * 9 + (50.0,):
        costs.add_clean(Iteration(0, end_s))
    costs.update_time()
    assert costs.baseline == Baseline(pytest.approx(2.6), pytest.approx(6.8), 8.0)


def test_a_cost_without_a_durable_time_is_not_compared_by_it() -> None:
    costs = RunCosts(CACHED)
    for _ in range(2):
        costs.add_cost(0.5, stall_s=0.0)
    assert costs.check_cached() is None


def test_it_knows_from_when_on_an_iteration_is_an_outlier() -> None:
    assert RunCosts(None).limit_s == math.inf
    costs = measured()  # iterations of 1 s
    assert costs.iteration_s == 1
    assert costs.limit_s == 4


@pytest.mark.parametrize(("num_clean", "num_told"), [(2, 2), (4, 4), (8, 8), (32, 8)])
def test_the_first_cost_is_as_uncertain_as_the_few_iterations_it_was_compared_with(
    num_clean: int, num_told: int
) -> None:
    costs = RunCosts()
    for at in range(num_clean):
        costs.add_clean(Iteration(0.0, 1.0 + 0.001 * (at % 2)))
    spread_s = costs.spread_s() if costs.iteration_s else 0.0
    costs.add_cost(2.0, stall_s=0.0, num_touched=1000.0)
    profile = costs.profile(HOST)
    assert profile is not None
    shared_s = 1000 * spread_s / math.sqrt(num_told)
    assert profile.cost_error_s == pytest.approx(shared_s, rel=0.05)
