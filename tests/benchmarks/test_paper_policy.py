"""The CheckFreq paper's rules and tuning, against its worked example and its released code."""

from __future__ import annotations

import pytest

from benchmarks.lab.paper_policy import (
    Rule,
    budget_interval,
    paper_decider,
    released_interval,
)
from checkfreq.simulation import Costs, changing, simulate, steady


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


def test_the_released_tuning_ends_with_the_first_window_within_the_bound() -> None:
    dearer = changing([(0.0, COSTS), (2_000.0, COSTS.times(2.0))])
    assert planned(Rule.RELEASED, dearer) == 21
    assert planned(Rule.RELEASED, dearer, dynamic=True, wall_s=8_000.0) == 41
