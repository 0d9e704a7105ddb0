"""The CheckFreq paper's rules and tuning, against its worked example and its released code."""

from __future__ import annotations

import pytest

from benchmarks.lab.paper_policy import (
    PaperTuner,
    Rule,
    budget_interval,
    paper_decider,
    released_interval,
)
from checkfreq.errors import ConfigError
from checkfreq.policy.tuner import Iteration, Measured, Verdict
from checkfreq.simulation import Costs, Exponential, changing, simulate, steady


def test_a_checkpoint_that_costs_an_iteration_comes_every_20_at_5_percent() -> None:
    k = budget_interval(cost_s=0.3, persist_s=1.0, iteration_s=0.3, max_overhead=0.05)
    assert k == 20


@pytest.mark.parametrize(
    ("cost_s", "persist_s", "k"), [(0.0, 0.0, 1), (0.1, 7.0, 7), (0.1, 7.1, 8), (0.5, 7.0, 10)]
)
def test_the_papers_interval_is_the_longer_of_budget_and_persist(
    cost_s: float, persist_s: float, k: int
) -> None:
    found = budget_interval(cost_s=cost_s, persist_s=persist_s, iteration_s=1.0, max_overhead=0.05)
    assert found == k


@pytest.mark.parametrize(
    ("full_s", "snapshot_s", "k"), [(3.0, 1.0, 4), (3.1, 1.0, 5), (1.0, 1.0, 1), (0.5, 1.0, 1)]
)
def test_the_released_interval_has_a_persist_fit_and_no_budget(
    full_s: float, snapshot_s: float, k: int
) -> None:
    assert released_interval(full_s=full_s, snapshot_s=snapshot_s, iteration_s=0.5) == k


#: A stall of an iteration, then a persist of three: full 4, snapshot 1.
COSTS = Costs(iteration_s=1.0, stall_s=1.0, copy_s=1.0, persist_s=3.0)


def planned(rule: Rule, trace: object, wall_s: float = 4_000.0, **settings: object) -> int | None:
    decider = paper_decider(rule, max_overhead=0.05, **settings)
    return simulate(trace, decider, wall_s=wall_s).planned_steps


def test_the_released_rule_begins_at_the_persist_and_goes_up_by_2_until_the_bound_holds() -> None:
    profile = COSTS.profile()
    run = simulate(
        steady(COSTS), paper_decider(Rule.RELEASED, max_overhead=0.05, known=profile), wall_s=900
    )
    planned_steps = [taken.interval_steps for taken in run.taken]
    assert planned_steps[:10] == [3, 3, 5, 7, 9, 11, 13, 15, 17, 19]
    assert set(planned_steps[10:]) == {21}


def test_the_papers_rule_has_the_budget_in_its_first_interval() -> None:
    run = simulate(
        steady(COSTS),
        paper_decider(Rule.BUDGET, max_overhead=0.05, known=COSTS.profile()),
        wall_s=900,
    )
    assert {taken.interval_steps for taken in run.taken} == {20}
    assert run.taken[0].step == 20


def test_both_profile_100_iterations_and_two_checkpoints_if_nothing_is_known() -> None:
    run = simulate(steady(COSTS), paper_decider(Rule.BUDGET, max_overhead=0.05), wall_s=900)
    steps = [(taken.step, taken.interval_steps) for taken in run.taken[:4]]
    assert steps == [(100, None), (103, None), (123, 20), (143, 20)]


def test_neither_rule_shortens_its_interval() -> None:
    cheaper = changing([(0.0, COSTS), (2_000.0, COSTS.times(0.1))])
    assert planned(Rule.BUDGET, cheaper) == 20
    assert planned(Rule.RELEASED, cheaper) == 21


def test_the_papers_rule_is_computed_again_when_a_window_is_above_the_bound() -> None:
    dearer = changing([(0.0, COSTS), (2_000.0, COSTS.times(2.0))])
    assert planned(Rule.BUDGET, dearer) == 40


def test_the_released_tuning_ends_with_the_first_window_within_the_bound() -> None:
    dearer = changing([(0.0, COSTS), (2_000.0, COSTS.times(2.0))])
    assert planned(Rule.RELEASED, dearer) == 21
    assert planned(Rule.RELEASED, dearer, dynamic=True, wall_s=8_000.0) == 41


def test_slower_iterations_are_always_charged_to_checkpoints() -> None:
    slower = Costs(iteration_s=1.1, stall_s=1.0, copy_s=1.0, persist_s=3.0)
    run = simulate(
        changing([(0.0, COSTS), (500.0, slower)]),
        paper_decider(Rule.RELEASED, max_overhead=0.05, dynamic=True),
        wall_s=20_000,
    )
    intervals = [taken.interval_steps or 0 for taken in run.taken]
    assert intervals == sorted(intervals)
    assert intervals[-1] > 60  # 19 would keep the bound


def test_after_a_failure_the_interval_is_known_at_once_if_it_was_given() -> None:
    run = simulate(
        steady(COSTS),
        paper_decider(Rule.BUDGET, max_overhead=0.05, known=COSTS.profile()),
        wall_s=50_000,
        failures=Exponential(1_000.0),
    )
    assert run.num_failures > 10
    assert run.overhead == pytest.approx(0.05, abs=0.005)


def profiled(rule: Rule) -> PaperTuner:
    return PaperTuner(rule, max_overhead=0.05, cached=COSTS.profile())


def test_a_checkpoint_waits_until_the_one_before_is_durable() -> None:
    tuner = profiled(Rule.RELEASED)
    assert tuner.due(step=2, now_s=2.0) is Verdict.NOT_YET
    assert tuner.due(step=3, now_s=3.0) is Verdict.TAKE
    tuner.started("a", step=3, start_s=3.0, is_periodic=True)
    assert tuner.due(step=6, now_s=7.0) is Verdict.LATE
    tuner.ended("a", end_s=7.5, measured=Measured(1.0, 3.5, 4.5, 0))
    assert tuner.due(step=6, now_s=8.0) is Verdict.TAKE


def test_a_test_checkpoint_that_failed_is_taken_again() -> None:
    tuner = PaperTuner(Rule.BUDGET, profile_iterations=1)
    assert tuner.due(step=1, now_s=0.0) is Verdict.MEASURING
    tuner.iteration(Iteration(0.0, 1.0))
    assert tuner.due(step=1, now_s=1.0) is Verdict.TAKE
    tuner.started("a", step=1, start_s=1.0, is_periodic=True)
    assert tuner.due(step=2, now_s=2.0) is Verdict.MEASURING
    tuner.ended("a", end_s=2.0, measured=None)
    tuner.iteration(Iteration(1.0, 2.0))
    assert tuner.due(step=2, now_s=2.0) is Verdict.TAKE
    assert tuner.profile() is None


@pytest.mark.parametrize("bound", [0.0, 1.0, float("nan"), -0.1])
def test_a_bound_outside_0_and_1_is_refused(bound: float) -> None:
    with pytest.raises(ConfigError, match="max_overhead"):
        PaperTuner(Rule.BUDGET, max_overhead=bound)
