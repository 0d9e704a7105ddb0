"""The simulator against the closed form, published figures, itself, and bad input."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import pairwise

import pytest

from checkfreq.errors import ConfigError
from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.tuner import RateTuner
from checkfreq.policy.waste import goodput
from checkfreq.simulation import (
    Cluster,
    Costs,
    Exponential,
    FixedInterval,
    Interruptions,
    Noise,
    Outcome,
    Rate,
    SpotPreemption,
    changing,
    simulate,
    steady,
)
from checkfreq.simulation.comparison import compare
from checkfreq.simulation.deciders import NewDecider

COSTS = Costs(iteration_s=0.5, stall_s=0.2, copy_s=0.5, persist_s=3.0, slowdown=0.1)
POLICY = FrequencyPolicy(max_overhead=0.035)


def every(steps: int) -> NewDecider:
    return lambda _: FixedInterval(steps)


def tuner(_: object) -> RateTuner:
    return RateTuner(POLICY)


@pytest.mark.parametrize("restart_s", [0.0, 30.0, 300.0])
@pytest.mark.parametrize("mtbf_s", [1_800.0, 20_000.0])
@pytest.mark.parametrize("cost_s", [0.5, 5.0, 60.0])
@pytest.mark.parametrize("work_s", [30, 120, 600])
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
        steady(COSTS),
        every(plan.interval_steps),
        wall_s=1e8,
        failures=Exponential(5_000.0),
    )
    assert outcome.lost_s / outcome.num_failures == pytest.approx(plan.expected_loss_s, rel=0.05)


class SteppedThrough:
    """Costs that never vary, said to do so: no replay."""

    is_steady = False

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def at(self, now_s: float) -> Costs:
        return self.costs


@pytest.mark.parametrize("new_decider", [every(60), tuner])
@pytest.mark.parametrize("failures", [Exponential(700.0), Interruptions(700.0)])
def test_replay_of_a_start_agrees_with_stepping_through_every_iteration(
    new_decider: NewDecider, failures: Exponential | Interruptions
) -> None:
    stepped, replayed = (
        simulate(trace, new_decider, wall_s=35_000.0, failures=failures, restart_s=30.0)
        for trace in (SteppedThrough(COSTS), steady(COSTS))
    )
    assert stepped.num_failures == replayed.num_failures > 30
    assert stepped.num_checkpoints == replayed.num_checkpoints
    for name in ("goodput", "overhead_s", "lost_s", "down_s"):
        assert getattr(replayed, name) == pytest.approx(getattr(stepped, name), rel=1e-4), name


@pytest.mark.parametrize("new_decider", [every(3), every(60), tuner])
@pytest.mark.parametrize("noise", [Noise(), Noise(0.05, 0.3)])
def test_every_second_is_counted_once(new_decider: NewDecider, noise: Noise) -> None:
    outcome = simulate(
        steady(COSTS),
        new_decider,
        wall_s=20_000.0,
        failures=Exponential(500.0),
        restart_s=20.0,
        noise=noise,
    )
    counted = outcome.progress_s + outcome.overhead_s + outcome.lost_s + outcome.down_s
    assert counted == pytest.approx(outcome.wall_s, rel=1e-9)
    assert min(outcome.progress_s, outcome.overhead_s, outcome.lost_s, outcome.down_s) > 0


def test_same_seed_same_outcome_and_another_seed_another() -> None:
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


def test_a_fixed_interval_waits_for_the_checkpoint_before() -> None:
    outcome = simulate(steady(COSTS), every(1), wall_s=1_000.0)

    steps = [taken.step for taken in outcome.taken]
    assert outcome.num_deferred > 0
    assert min(b - a for a, b in pairwise(steps)) * 0.5 >= 3.0


def test_a_checkpoint_that_holds_training_until_it_is_durable_costs_all_of_that() -> None:
    held = COSTS.blocking()
    assert held.cost_s == held.durable_s == COSTS.durable_s == 3.5
    assert COSTS.cost_s == pytest.approx(0.2 + 0.1 * 3.3)


def test_knowing_how_often_the_run_fails_never_costs_goodput() -> None:
    costs = Costs(iteration_s=1.0, stall_s=1.0, copy_s=1.0, persist_s=10.0)
    for num_gpus in (8, 1_024, 16_384, 100_000):
        mtbf_s = Cluster(num_gpus).mtbf_s
        found = {
            arm.name: arm.outcome.goodput for arm in compare(costs, mtbf_s=mtbf_s, restart_s=60.0)
        }
        assert found["auto mtbf_s"] >= found["auto"] - 0.001
        assert found["auto goodput"] == pytest.approx(found["daly"], abs=0.002)


def test_time_between_failures_follows_the_published_rates() -> None:
    assert Cluster(16_384).mtbf_s / 3600 == pytest.approx(1.8, rel=0.01)
    assert Cluster(16_384, Rate.PRETRAINING).mtbf_s / 3600 == pytest.approx(3.1, rel=0.01)
    assert Cluster(100_000, Rate.LARGEST).mtbf_s / 60 == pytest.approx(18.0)
    assert Cluster(64, Rate.SPOT).mtbf_s / 60 == pytest.approx(24 * 60 / 127)
    assert Cluster(1).mtbf_s == pytest.approx(8 * Cluster(8).mtbf_s)


@pytest.mark.parametrize("name", [field.name for field in fields(Costs)])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_costs_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"Costs.{name}"):
        Costs(**{"iteration_s": 1.0, "stall_s": 0.0, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Costs(iteration_s=0.0, stall_s=0.0), "iteration_s"),
        (lambda: Costs(iteration_s=1.0, stall_s=0.0, slowdown=1.0), "slowdown"),
        (lambda: Noise(iterations=-0.1), "Noise.iterations"),
        (lambda: Noise(checkpoints=2.0), "Noise.checkpoints"),
        (lambda: Exponential(0.0), "mtbf_s"),
        (lambda: Exponential(math.nan), "mtbf_s"),
        (lambda: Interruptions(-1.0), "every_s"),
        (lambda: SpotPreemption(per_day=0.0), "per_day"),
        (lambda: SpotPreemption(per_day=1.0, notice_s=-1.0), "notice_s"),
        (lambda: Cluster(0), "num_gpus"),
        (lambda: FixedInterval(0), "at least 1"),
        (lambda: changing([]), "ascend"),
        (lambda: changing([(1.0, COSTS)]), "ascend"),
        (lambda: changing([(0.0, COSTS), (5.0, COSTS), (4.0, COSTS)]), "ascend"),
        (lambda: changing([(0.0, COSTS), (5.0, COSTS)], period_s=5.0), "period"),
        (lambda: simulate(steady(COSTS), every(1), wall_s=0.0), "wall_s"),
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
