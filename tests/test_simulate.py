"""The simulator against the closed form, published figures, itself, and bad input."""

from __future__ import annotations

import math
import statistics
from dataclasses import fields
from itertools import pairwise
from random import Random

import pytest

from checkfreq.errors import ConfigError
from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.tuner import Iteration, RateTuner
from checkfreq.policy.waste import goodput
from checkfreq.simulation import (
    Cluster,
    Costs,
    Exponential,
    FixedInterval,
    Interruptions,
    Noise,
    Outcome,
    Rhythm,
    SpotPreemption,
    changing,
    simulate,
    steady,
)
from checkfreq.simulation.comparison import compare
from checkfreq.simulation.costs import CorrelatedSpread
from checkfreq.simulation.deciders import NewDecider

pytestmark = pytest.mark.slow

COSTS = Costs(iteration_s=0.5, stall_s=0.2, copy_s=0.5, persist_s=3.0, slowdown=0.1)
POLICY = FrequencyPolicy(max_overhead=0.035)


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_noise_of_iterations_is_as_wide_and_as_correlated_as_asked_for(correlation: float) -> None:
    factors = CorrelatedSpread(Random(1), 0.1, correlation)
    found = [factors.next() for _ in range(50_000)]

    assert statistics.fmean(found) == pytest.approx(1.0, abs=0.005)
    assert statistics.stdev(found) == pytest.approx(0.1, rel=0.05)
    assert statistics.correlation(found[1:], found[:-1]) == pytest.approx(correlation, abs=0.02)


def every(steps: int) -> NewDecider:
    return lambda _: FixedInterval(steps)


def tuner(_: object) -> RateTuner:
    return RateTuner(POLICY)


@pytest.mark.parametrize(
    ("work_s", "cost_s", "mtbf_s", "restart_s"),
    [
        (30, 0.5, 1_800.0, 0.0),
        (30, 60.0, 1_800.0, 300.0),
        (120, 5.0, 20_000.0, 30.0),
        (600, 60.0, 20_000.0, 300.0),
        (600, 0.5, 1_800.0, 30.0),
    ],
)
def test_goodput_is_that_of_the_closed_form_within_one_percent(
    work_s: int, cost_s: float, mtbf_s: float, restart_s: float
) -> None:
    outcome = simulate(
        steady(Costs(iteration_s=1.0, stall_s=cost_s)),
        every(work_s),
        wall_s=20_000 * mtbf_s,
        failures=Exponential(mtbf_s),
        restart_s=restart_s,
        seed=work_s,
    )
    expected = goodput(work_s, cost_s=cost_s, mtbf_s=mtbf_s, restart_s=restart_s)
    assert outcome.goodput == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("stall_min", "expected"), [(10, 0.444), (3, 0.833)])
def test_published_goodput_of_100000_gpus_that_fail_every_18_minutes(
    stall_min: int, expected: float
) -> None:
    outcome = simulate(
        steady(Costs(iteration_s=1.0, stall_s=0.0)),
        every(1),
        wall_s=20_000 * 18 * 60.0,
        failures=Interruptions(18 * 60.0),
        restart_s=stall_min * 60.0,
    )
    assert outcome.goodput == pytest.approx(expected, rel=0.01)


def test_a_failure_costs_half_an_interval_and_the_time_to_durable_as_the_plan_predicts() -> None:
    plan = POLICY.plan(COSTS.profile())
    outcome = simulate(
        steady(COSTS), every(plan.interval_steps), wall_s=1e8, failures=Exponential(5_000.0)
    )
    assert outcome.lost_s / outcome.num_failures == pytest.approx(plan.expected_loss_s, rel=0.05)


class SteppedThrough:
    """Costs that never vary, said to do so: no replay."""

    is_steady = False

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def at(self, now_s: float) -> Costs:
        return self.costs


#: Every iteration is touched by a checkpoint: intervals never become equal.
STORAGE_BOUND = Costs(iteration_s=0.5, stall_s=0.01, copy_s=0.01, persist_s=4.75)


@pytest.mark.parametrize(
    ("costs", "new_decider", "failures"),
    [
        (COSTS, every(60), Exponential(700.0)),
        (COSTS, tuner, Interruptions(700.0)),
        (STORAGE_BOUND, tuner, Exponential(700.0)),
    ],
)
def test_replay_of_a_start_agrees_with_stepping_through_every_iteration(
    costs: Costs, new_decider: NewDecider, failures: Exponential | Interruptions
) -> None:
    stepped, replayed = (
        simulate(trace, new_decider, wall_s=25_000.0, failures=failures, restart_s=30.0)
        for trace in (SteppedThrough(costs), steady(costs))
    )
    assert stepped.num_failures == replayed.num_failures > 20
    assert stepped.num_checkpoints == pytest.approx(replayed.num_checkpoints, abs=1)  # at the end
    for name in ("goodput", "overhead_s", "lost_s", "down_s"):
        assert getattr(replayed, name) == pytest.approx(getattr(stepped, name), rel=1e-4), name
    # Within a checkpoint's end or so: a start that a failure ends is not told to the instant.
    most_s = replayed.largest_cost_s
    assert replayed.excess_s == pytest.approx(stepped.excess_s, abs=most_s)


class Counting(RateTuner):
    """How many iterations are stepped through."""

    num_iterations = 0

    def iteration(self, iteration: Iteration) -> None:
        Counting.num_iterations += 1
        super().iteration(iteration)


@pytest.mark.parametrize(
    ("cost_s", "persist_s", "iteration_s"),
    [
        (0.01, 10.0, 1.0),  # an interval is exactly what persisting takes
        (1.0, 30.0, 1.0),
        (0.3, 7.7, 0.13),
        (100.0, 0.0, 1e-5),
    ],
)
def test_long_runs_without_failures_are_not_stepped_through(
    cost_s: float, persist_s: float, iteration_s: float
) -> None:
    costs = Costs(iteration_s=iteration_s, stall_s=cost_s, copy_s=cost_s, persist_s=persist_s)
    Counting.num_iterations = 0
    outcome = simulate(
        steady(costs), lambda _: Counting(POLICY, cached=costs.profile()), wall_s=1e10
    )

    assert Counting.num_iterations < 102_000
    assert outcome.wall_s == 1e10
    # Right as far as the mean of the intervals that are repeated is typical.
    assert outcome.overhead <= 1.001 * POLICY.max_overhead + cost_s / outcome.progress_s
    most_steps = POLICY.plan(costs.profile()).interval_steps
    spacing_steps = outcome.num_iterations / outcome.num_checkpoints
    assert spacing_steps == pytest.approx(most_steps, rel=0.1)


def test_a_run_that_would_take_minutes_to_step_through_is_refused_with_a_sentence() -> None:
    overlapping = Costs(iteration_s=1e-3, stall_s=0.0, copy_s=5e-3, persist_s=1e-3)
    with pytest.raises(ConfigError, match="iterations to step through"):
        simulate(steady(overlapping), every(5), wall_s=1e9)
    with pytest.raises(ConfigError, match="more than 1000000 failures"):
        simulate(steady(COSTS), every(60), wall_s=1e9, failures=Exponential(1.0), restart_s=50.0)


def test_a_run_that_never_gets_through_a_restart_ends() -> None:
    outcome = simulate(
        steady(COSTS), every(60), wall_s=1_000.0, failures=Exponential(1.0), restart_s=60.0
    )
    assert outcome.goodput == 0
    assert 900 < outcome.num_failures < 1_100


@pytest.mark.parametrize("new_decider", [every(3), every(60), tuner])
@pytest.mark.parametrize("noise", [Noise(), Noise(0.05, 0.3)])
def test_every_second_is_counted_once(new_decider: NewDecider, noise: Noise) -> None:
    outcome = simulate(
        steady(COSTS),
        new_decider,
        wall_s=6_000.0,
        failures=Exponential(500.0),
        restart_s=20.0,
        noise=noise,
    )
    counted = outcome.progress_s + outcome.overhead_s + outcome.lost_s + outcome.down_s
    assert counted == pytest.approx(outcome.wall_s, rel=1e-9)
    assert min(outcome.progress_s, outcome.overhead_s, outcome.lost_s, outcome.down_s) > 0


def test_the_same_seed_gives_the_same_outcome_and_a_different_one_does_not() -> None:
    def ran(seed: int) -> Outcome:
        return simulate(
            steady(COSTS),
            tuner,
            wall_s=3_000.0,
            failures=Exponential(500.0),
            noise=Noise(0.05, 0.3),
            seed=seed,
        )

    assert ran(1) == ran(1)
    assert ran(1) != ran(2)


def test_a_fixed_interval_waits_for_one_of_two_slots() -> None:
    outcome = simulate(steady(COSTS), every(1), wall_s=1_000.0)

    starts_s = [taken.start_s for taken in outcome.taken]
    assert outcome.num_deferred > 0
    # One is persisted, one has been copied: the third waits for the first.
    assert min(c - a for a, c in pairwise(starts_s[2::2])) >= 3.0
    assert max(b - a for a, b in pairwise(starts_s[2:])) < 4.5


@pytest.mark.parametrize(("copy_s", "num_deferred"), [(1.0, 0), (4.0, 1)])
def test_a_fixed_interval_is_late_only_while_the_one_before_is_copied(
    copy_s: float, num_deferred: int
) -> None:
    # 6 iterations and the stall are 3.2 s: shorter than copy and persist, not than either.
    costs = Costs(iteration_s=0.5, stall_s=0.2, copy_s=copy_s, persist_s=3.0)
    outcome = simulate(steady(costs), every(6), wall_s=1_000.0)

    # The first waits: what a copy takes is not known before one is durable.
    assert (outcome.num_deferred > 1) == num_deferred
    spacing_s = (outcome.taken[-1].start_s - outcome.taken[2].start_s) / (len(outcome.taken) - 3)
    assert spacing_s == pytest.approx(max(3.2, copy_s + 0.2), abs=0.3)


class Recording(FixedInterval):
    """What it was told of the checkpoints begun."""

    def __init__(self) -> None:
        super().__init__(60)
        self.are_periodic: list[bool] = []

    def started(self, attempt: str, *, step: int, start_s: float, is_periodic: bool) -> None:
        self.are_periodic.append(is_periodic)
        super().started(attempt, step=step, start_s=start_s, is_periodic=is_periodic)


@pytest.mark.parametrize("is_steady", [True, False])
def test_each_start_has_one_decider_that_is_told_of_periodic_checkpoints_alone(
    is_steady: bool,
) -> None:
    made: list[Recording] = []

    def new_decider(_: object) -> Recording:
        made.append(Recording())
        return made[-1]

    trace = steady(COSTS) if is_steady else SteppedThrough(COSTS)
    outcome = simulate(trace, new_decider, wall_s=3_000.0, failures=Exponential(500.0))

    assert outcome.num_failures > 2
    assert len(made) == (1 if is_steady else 1 + outcome.num_failures)
    told = [is_periodic for each in made for is_periodic in each.are_periodic]
    assert told
    assert all(told)


def test_an_interval_that_storage_limits_is_marked() -> None:
    costs = Costs(iteration_s=1.0, stall_s=0.001, persist_s=100.0)
    arms = {arm.name: arm for arm in compare(costs, mtbf_s=1e5, restart_s=60.0, interval_s=50.0)}

    assert {name for name in arms if arms[name].is_limited} == {"fixed", "young", "daly"}
    assert {arm.interval_steps for arm in arms.values()} == {100}


def test_knowing_how_often_the_run_fails_never_costs_goodput() -> None:
    costs = Costs(iteration_s=1.0, stall_s=1.0, copy_s=1.0, persist_s=10.0)
    for num_gpus in (1_024, 100_000):
        mtbf_s = Cluster(num_gpus).mtbf_s
        found = {
            arm.name: arm.outcome.goodput for arm in compare(costs, mtbf_s=mtbf_s, restart_s=60.0)
        }
        assert found["auto mtbf_s"] >= found["auto"] - 0.001
        assert found["auto goodput"] == pytest.approx(found["daly"], abs=0.002)


@pytest.mark.parametrize("name", [field.name for field in fields(Costs)])
def test_invalid_costs_are_refused(name: str) -> None:
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"Costs.{name}"):
            Costs(**{"iteration_s": 1.0, "stall_s": 0.0, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Costs(iteration_s=0.0, stall_s=0.0), "iteration_s"),
        (lambda: Costs(iteration_s=1.0, stall_s=0.0, slowdown=1.0), "slowdown"),
        (lambda: Noise(iterations=-0.1), "Noise.iterations"),
        (lambda: Noise(correlation=1.5), "Noise.correlation"),
        (lambda: Rhythm(iterations=(1.0, 0.0)), "Rhythm.iterations"),
        (lambda: Exponential(0.0), "mtbf_s"),
        (lambda: Interruptions(-1.0), "every_s"),
        (lambda: SpotPreemption(per_day=0.0), "per_day"),
        (lambda: SpotPreemption(per_day=1.0, notice_s=-1.0), "notice_s"),
        (lambda: Cluster(0), "num_gpus"),
        (lambda: FixedInterval(0), "at least 1"),
        (lambda: changing([(0.0, COSTS), (5.0, COSTS), (4.0, COSTS)]), "ascend"),
        (lambda: changing([(0.0, COSTS), (5.0, COSTS)], period_s=5.0), "period"),
        (lambda: simulate(steady(COSTS), every(1), wall_s=math.inf), "wall_s"),
        (lambda: simulate(steady(COSTS), every(1), wall_s=1.0, restart_s=-1.0), "restart_s"),
        (
            lambda: simulate(
                steady(COSTS), every(1), wall_s=1.0, restart_s=9.0, failures=Interruptions(9.0)
            ),
            "does not fit",
        ),
    ],
)
def test_bad_input_is_refused_by_name(make, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=said):
        make()
