"""The tuner over simulated runs: the bound holds, the interval settles, longer or shorter.

Overhead here is the true one, which the tuner can only estimate. A seed is a run of half an hour
or so of simulated time.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean

import pytest

from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.profile import Profile
from checkfreq.policy.tuner import RateTuner
from checkfreq.simulation import (
    Costs,
    Exponential,
    Noise,
    Outcome,
    simulate,
    steady,
)
from checkfreq.simulation.deciders import NewDecider
from checkfreq.simulation.scenarios import Scenario, is_close, scenarios, settlings

pytestmark = pytest.mark.slow

SCENARIOS = {scenario.name: scenario for scenario in scenarios()}
#: One is quick; the others show that it was no luck.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.more) for seed in (1, 2))]
RHYTHMIC = [name for name in SCENARIOS if SCENARIOS[name].rhythm]
#: Where one interval is the best one, and it can be told from the measurements of twenty.
SETTLING = [name for name in SCENARIOS if name != "bursty" and name not in RHYTHMIC]
#: A few costs that vary by a third say little: see the test of their own.
STEADY_ENOUGH = [name for name in SETTLING if name != "30 % noise"]
OUTLYING = [name for name in RHYTHMIC if "outlier" in name]

for_each_scenario = pytest.mark.parametrize("name", SCENARIOS)
for_each_seed = pytest.mark.parametrize("seed", SEEDS)


@cache
def ran_with(name: str, seed: int) -> tuple[Scenario, Outcome, RateTuner]:
    scenario = SCENARIOS[name]
    decider = scenario.tuner()
    return scenario, scenario.run(seed, decider), decider


def ran(name: str, seed: int) -> tuple[Scenario, Outcome]:
    return ran_with(name, seed)[:2]


@for_each_seed
@for_each_scenario
def test_overhead_never_exceeds_the_bound_by_more_than_one_checkpoint_and_the_exempt_first(
    name: str, seed: int
) -> None:
    scenario, outcome = ran(name, seed)

    assert outcome.num_checkpoints > 20
    # A few far dearer ones are known for what they are only when they have come three times, and
    # what noise explains of a cost is paid over the next sixteen.
    is_late = "dearer" in name or scenario.noise
    largest_s = outcome.largest_cost_s * (3 if is_late else 1)
    assert outcome.excess_s <= largest_s + outcome.exempt_s
    # That is nothing in the long run.
    last_s = (outcome.largest_cost_s + outcome.exempt_s) / outcome.progress_s
    assert outcome.overhead <= scenario.max_overhead + last_s


@for_each_seed
@pytest.mark.parametrize("name", STEADY_ENOUGH)
def test_interval_is_within_a_tenth_of_the_oracles_20_checkpoints_after_each_change_and_stays(
    name: str, seed: int
) -> None:
    for found in settlings(*ran(name, seed)):
        assert found.num_checkpoints is not None
        assert found.num_checkpoints <= 20, found
        assert is_close(found.typical_steps, found.oracle_steps), found
        assert found.close_part >= 0.8, found


@for_each_seed
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in OUTLYING])
def test_claimed_overhead_is_the_true_one_to_0_3_points(name: str, seed: int) -> None:
    _, outcome, decider = ran_with(name, seed)

    assert decider.measured_overhead == pytest.approx(outcome.overhead, abs=0.003)


@for_each_seed
@pytest.mark.parametrize("name", OUTLYING)
def test_slow_iterations_of_a_plain_loop_make_checkpoints_rarer_but_by_no_order_of_magnitude(
    name: str, seed: int
) -> None:
    _, outcome, decider = ran_with(name, seed)
    (found,) = settlings(*ran(name, seed))

    # What an outlier adds to a few costs is larger than the costs: the careful side is taken.
    assert outcome.overhead <= decider.measured_overhead + 0.003
    assert found.actual_steps <= 4 * found.oracle_steps


@for_each_seed
@pytest.mark.parametrize("name", [name for name in RHYTHMIC if name not in OUTLYING])
def test_a_rhythm_of_iterations_or_checkpoints_leaves_them_as_far_apart_as_the_oracles(
    name: str, seed: int
) -> None:
    (found,) = settlings(*ran(name, seed))

    # Planned may be less: of checkpoints of which a few are far dearer, the usual ones are
    # planned for, and the budget makes up for the others.
    assert abs(found.actual_steps - found.oracle_steps) <= 1 + 0.1 * found.oracle_steps, found


@for_each_seed
def test_bound_holds_over_failures_with_one_exempt_checkpoint_for_each_start(seed: int) -> None:
    costs = Costs(iteration_s=0.1, stall_s=0.02, copy_s=0.05, persist_s=0.3, slowdown=0.1)
    outcome = simulate(
        steady(costs),
        tuner(0.035),
        wall_s=2_000.0,
        failures=Exponential(100.0),
        restart_s=5.0,
        noise=Noise(0.01, 0.1),
        seed=seed,
        keep_profile=True,
    )

    assert outcome.num_failures > 5
    assert outcome.excess_s <= outcome.largest_cost_s + outcome.exempt_s


def tuner(max_overhead: float) -> NewDecider:
    policy = FrequencyPolicy(max_overhead=max_overhead)
    return lambda cached: RateTuner(policy, cached=cached)


#: A checkpoint touches four iterations and costs 0.15 of one, most of it slowdown.
_TOUCHING = Costs(iteration_s=0.1, stall_s=0.005, copy_s=0.04, persist_s=0.14, slowdown=0.0571)
_NOISES = [Noise(0.05, 0.2), Noise(0.1, 0.2, 0.8)]


def _touching(noise: Noise, seed: int, *, wall_s: float, cached: Profile | None = None) -> Outcome:
    return simulate(
        steady(_TOUCHING),
        lambda _: RateTuner(FrequencyPolicy(max_overhead=0.035), cached=cached),
        wall_s=wall_s,
        noise=noise,
        seed=seed,
    )


@pytest.mark.parametrize("noise", _NOISES, ids=str)
def test_a_plan_after_six_checkpoints_seldom_exceeds_the_bound_where_iterations_are_noisy(
    noise: Noise,
) -> None:
    outcomes = [_touching(noise, seed, wall_s=60.0) for seed in range(30)]
    plans = [outcome.taken[6].interval_steps or 0 for outcome in outcomes]
    used = [_TOUCHING.cost_s / (steps * _TOUCHING.iteration_s) / 0.035 for steps in plans]

    # Compared with the mean of all clean iterations, and planned with the mean of the costs, by
    # seed and noise, 11 to 25 of the 30 exceed it, and most by far.
    assert sum(part > 1.1 for part in used) <= 7
    assert fmean(used) >= 0.5
    # And over the whole run, in which intervals that were too short are made up for.
    assert sorted(outcome.overhead for outcome in outcomes)[-2] <= 1.1 * 0.035
    assert fmean(outcome.overhead for outcome in outcomes) >= 0.5 * 0.035
