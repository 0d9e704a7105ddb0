"""What each checkpoint is charged with."""

from __future__ import annotations

import pytest

from checkfreq.policy.charges import Baseline, Charge, Charges, Outliers
from checkfreq.policy.observations import Iteration, Measured

MEASURED = Measured(copy_s=0.1, persist_s=0.4, durable_s=0.5, state_bytes=10)
BASELINE = Baseline(iteration_s=1.0, raw_s=1.0, limit_s=4.0)
TWICE = Baseline(iteration_s=2.0, raw_s=2.0, limit_s=8.0)


def settled(
    *iterations: Iteration,
    end_s: float,
    charges: Charges | None = None,
    baseline: Baseline | None = BASELINE,
    after_s: float = 1.0,
) -> Charge:
    """One checkpoint from 0 to ``end_s``; two quiet iterations of ``after_s`` follow."""
    charges = Charges() if charges is None else charges
    charges.begin("a", start_s=0.0, reserved_s=0.0)
    charges.end("a", end_s=end_s, measured=MEASURED)
    for iteration in iterations:
        charges.add(iteration, baseline=baseline)
    assert not charges.settle()
    for iteration in after(iterations[-1].end_s, each_s=after_s):
        charges.add(iteration, baseline=baseline)
    (charge,) = charges.settle()
    return charge


def after(start_s: float, *, each_s: float = 1.0) -> list[Iteration]:
    middle_s = start_s + each_s
    return [Iteration(start_s, middle_s), Iteration(middle_s, middle_s + each_s)]


def begun(*spans: tuple[float, float]) -> Charges:
    """Checkpoints a, b, ... that began and ended at these times."""
    charges = Charges()
    for name, (start_s, end_s) in zip("abc", spans, strict=False):
        charges.begin(name, start_s=start_s, reserved_s=0.0)
        charges.end(name, end_s=end_s, measured=MEASURED)
    return charges


def test_a_checkpoint_costs_what_its_iterations_took_longer() -> None:
    charge = settled(Iteration(0, 1.5, stall_s=0.25), Iteration(1.5, 2.75), end_s=2)
    assert charge.cost_s == pytest.approx(0.75)
    assert charge.stall_s == pytest.approx(0.25)
    assert (charge.num_touched, charge.touched_s) == (4, 4.75)
    assert not charge.is_partial


def test_a_worker_that_is_still_busy_prolongs_the_aftermath() -> None:
    charges = begun((0.0, 0.5))
    charges.add(Iteration(0, 1), baseline=BASELINE)
    for i in range(1, 6):
        assert charges.add(Iteration(1.5 * i, 1.5 * i + 1.5, is_quiet=False), baseline=BASELINE)
        assert not charges.settle()
    charges.add(Iteration(9, 10), baseline=BASELINE)
    (charge,) = charges.settle()
    assert charge.cost_s == pytest.approx(5 * 0.5)
    assert charge.num_after == 6


def test_one_is_over_at_once_when_another_touches_the_iteration() -> None:
    charges = begun((0.0, 0.5), (1.0, 1.5))
    charges.add(Iteration(0, 1), baseline=BASELINE)
    assert not charges.settle()
    charges.add(Iteration(1, 3), baseline=BASELINE)
    (first,) = charges.settle()
    assert (first.cost_s, first.num_after) == (0, 0)
    for iteration in after(3.0):
        charges.add(iteration, baseline=BASELINE)
    assert charges.settle()[0].cost_s == 1


def test_two_share_an_iteration_by_how_long_they_were_in_it() -> None:
    charges = begun((0.0, 3.0), (3.0, 4.0))
    charges.add(Iteration(0, 4), baseline=TWICE)
    (first,) = charges.settle()  # the other is felt from there on
    assert first.cost_s == pytest.approx(1.5)
    for iteration in after(4.0, each_s=2.0):
        charges.add(iteration, baseline=TWICE)
    assert [charge.cost_s for charge in charges.settle()] == pytest.approx([0.5])


def test_an_iteration_without_a_baseline_is_charged_only_its_stall() -> None:
    charge = settled(Iteration(0, 30, stall_s=0.5), end_s=2, baseline=None)
    assert charge.is_partial
    assert (charge.cost_s, charge.num_touched) == (0.5, 0)


def test_time_far_above_t_is_not_charged_until_it_is_usual() -> None:
    charges = Charges()
    found = [settled(Iteration(0, 21), end_s=1, charges=charges) for _ in range(3)]
    assert [charge.cost_s for charge in found] == [3, 3, 20]
    assert [charge.uncharged_s for charge in found] == [17, 17, 0]


def test_only_the_first_end_of_one_in_flight_counts() -> None:
    charges = begun((0.0, 1.0))
    assert not charges.end("a", end_s=2.0, measured=None)
    assert not charges.end("unknown", end_s=2.0, measured=None)


class TestOutliers:
    @staticmethod
    def charge(uncharged_s: float = 0.0, *, num_touched: float = 3.0) -> Charge:
        return Charge(0.0, 0.0, uncharged_s=uncharged_s, num_touched=num_touched)

    def test_at_the_third_outlier_all_are_owed_except_those_that_would_have_come_anyway(
        self,
    ) -> None:
        outliers = Outliers()
        for over_s in (*[0.0] * 9, 10.0):
            outliers.add_clean(over_s)  # 1 s each, on average
        assert [outliers.add(self.charge(30.0)) for _ in range(3)] == [0, 0, 90 - 9]

    def test_much_more_is_more_than_three_times(self) -> None:
        for uncharged_s, owed_s in ((9.0, 0.0), (9.5, 3 * 9.5 - 9)):
            outliers = Outliers()
            outliers.add_clean(1.0)
            assert [outliers.add(self.charge(uncharged_s)) for _ in range(3)] == [0, 0, owed_s]
