"""The simulator against the closed form, published figures, itself, and bad input."""

from __future__ import annotations

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
    Rhythm,
    SpotPreemption,
    changing,
    simulate,
    steady,
)
from checkfreq.simulation.comparison import compare
from checkfreq.simulation.deciders import NewDecider

pytestmark = pytest.mark.slow

COSTS = Costs(iteration_s=0.5, stall_s=0.2, copy_s=0.5, persist_s=3.0, slowdown=0.1)
POLICY = FrequencyPolicy(max_overhead=0.035)


def every(steps: int) -> NewDecider:
    return lambda _: FixedInterval(steps)


def tuner(_: object) -> RateTuner:
    return RateTuner(POLICY)


@pytest.mark.parametrize(
    ("work_s", "cost_s", "mtbf_s", "restart_s"),
    [
        (30, 60.0, 1_800.0, 300.0),
        (120, 5.0, 20_000.0, 30.0),
        (600, 60.0, 20_000.0, 300.0),
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


@pytest.mark.more
def test_a_run_that_would_take_minutes_to_step_through_is_refused_with_a_sentence() -> None:
    overlapping = Costs(iteration_s=1e-3, stall_s=0.0, copy_s=5e-3, persist_s=1e-3)
    with pytest.raises(ConfigError, match="iterations to step through"):
        simulate(steady(overlapping), every(5), wall_s=1e9)


def test_knowing_how_often_the_run_fails_never_costs_goodput() -> None:
    costs = Costs(iteration_s=1.0, stall_s=1.0, copy_s=1.0, persist_s=10.0)
    for num_gpus in (1_024, 100_000):
        mtbf_s = Cluster(num_gpus).mtbf_s
        found = {
            arm.name: arm.outcome.goodput for arm in compare(costs, mtbf_s=mtbf_s, restart_s=60.0)
        }
        assert found["auto mtbf_s"] >= found["auto"] - 0.001
        assert found["auto goodput"] == pytest.approx(found["daly"], abs=0.002)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Costs(iteration_s=0.0, stall_s=0.0), "iteration_s"),
        (lambda: Noise(iterations=-0.1), "Noise.iterations"),
        (lambda: Rhythm(iterations=(1.0, 0.0)), "Rhythm.iterations"),
        (lambda: Exponential(0.0), "mtbf_s"),
        (lambda: SpotPreemption(per_day=0.0), "per_day"),
        (lambda: Cluster(0), "num_gpus"),
        (lambda: FixedInterval(0), "at least 1"),
        (lambda: changing([(0.0, COSTS), (5.0, COSTS), (4.0, COSTS)]), "ascend"),
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
