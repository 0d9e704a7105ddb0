"""The overhead of a run: totals for the user, a balance for the decision."""

from __future__ import annotations

import pytest

from checkfreq.policy.budget import OverheadBudget


def budget(rate: float = 0.1, *, upper_s: float = 1.0) -> OverheadBudget:
    fresh = OverheadBudget(rate)
    fresh.plan_for(upper_s, rate=rate)
    return fresh


def earned(*iterations_s: float | None, **changes: float) -> OverheadBudget:
    found = budget(**changes)
    for iteration_s in iterations_s:
        found.earn(iteration_s)
    return found


def test_no_more_than_four_checkpoints_can_be_saved_up() -> None:
    assert earned(*[10.0] * 100).balance_s == pytest.approx(4.0)
    assert earned(*[10.0] * 100, upper_s=2.0).balance_s == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("cost_s", "spent_s"),
    [(0.0, 0.0), (0.1, 0.1), (0.5, 0.5), (0.6, 0.5), (7.0, 0.5)],  # of 1 s earned
)
def test_a_boundary_takes_at_most_half_of_what_its_iteration_earns(
    cost_s: float, spent_s: float
) -> None:
    found = earned(10.0, 10.0)
    found.pay_boundary(cost_s, iteration_s=10.0)
    assert found.overhead_s == pytest.approx(cost_s)
    assert found.balance_s == pytest.approx(2.0 - spent_s)


def test_a_meeting_is_paid_out_of_half_of_what_is_earned_after_it() -> None:
    found = earned(10.0)
    found.pay_meeting(0.6)
    assert (found.overhead_s, found.balance_s) == (0.6, 1.0)
    balances_s = []
    for _ in range(3):
        found.earn(5.0)
        balances_s.append(found.balance_s)
    assert balances_s == pytest.approx([1.25, 1.5, 1.9])  # 0.5 s each time, less 0.6 s in all


@pytest.mark.parametrize(
    ("cost_s", "owed_s", "balance_s"), [(0.4, None, 1.6), (5.0, None, -3.0), (5.0, 2.0, 0.0)]
)
def test_a_checkpoint_is_reserved_for_and_what_it_cost_is_taken_off_instead(
    cost_s: float, owed_s: float | None, balance_s: float
) -> None:
    found = earned(10.0, 10.0)
    reserved_s = found.reserve()
    assert (reserved_s, found.balance_s, found.overhead_s) == (1.0, 1.0, 0.0)
    found.settle(cost_s, reserved_s=reserved_s, owed_s=owed_s)
    assert found.overhead_s == cost_s
    assert found.balance_s == pytest.approx(balance_s)


@pytest.mark.parametrize(
    ("num_iterations", "unreserved_s", "covers", "steps"),
    [
        (4, 0.0, False, 40),  # 0.5 s, an eighth of 0.1 s at a time
        (7, 0.0, False, 10),
        (8, 0.0, True, 0),
        (8, 0.5, False, 40),
        (12, 0.5, True, 0),
    ],
)
def test_the_next_one_is_covered_once_its_upper_limit_is(
    num_iterations: int, unreserved_s: float, covers: bool, steps: int
) -> None:
    found = earned(*[1.0] * num_iterations, rate=0.125)
    assert found.covers_checkpoint(unreserved_s) is covers
    left = found.steps_to_checkpoint(unreserved_s, iteration_s=0.1, boundary_s=0.0)
    assert left == steps
