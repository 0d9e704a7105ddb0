"""Robust estimates over sliding windows."""

from __future__ import annotations

import math
import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.policy.estimates import Estimate, IterationTime, RecentMedian


def time_of(*seconds: float) -> IterationTime:
    estimate = IterationTime()
    for value in seconds:
        estimate.add(value)
        estimate.value()
    return estimate


class TestIterationTime:
    def test_there_is_none_before_the_first(self) -> None:
        assert IterationTime().value() is None
        assert IterationTime().low() is None
        assert IterationTime().raw_mean() is None
        assert IterationTime().limit() == math.inf

    def test_an_outlier_counts_as_four_medians_and_in_full_in_the_raw_mean(self) -> None:
        estimate = time_of(*[1.0] * 9, 50.0)
        assert estimate.value() == pytest.approx((9 + 4) / 10)
        assert estimate.raw_mean() == pytest.approx((9 + 50) / 10)
        assert estimate.limit() == 4.0

    def test_nine_in_ten_take_at_least_the_low_value(self) -> None:
        assert time_of(*[2.0] * 5, 1.0, *[2.0] * 6).low() == 2.0
        assert time_of(*[2.0, 2.0, 1.0] * 5).low() == 1.0

    @pytest.mark.parametrize("now", [1.3, 0.7])
    def test_it_follows_a_change_within_sixteen_iterations_or_eight_after_an_update(
        self, now: float
    ) -> None:
        assert time_of(*[1.0] * 60, *[now] * 16).value() == pytest.approx(now)
        estimate = time_of(*[1.0] * 60, *[now] * 8)
        estimate.update()
        assert estimate.value() == pytest.approx(now)
        assert estimate.low() == now

    def test_it_is_not_computed_anew_for_each(self) -> None:
        estimate, values = time_of(*[1.0] * 64), set()
        for _ in range(32):
            estimate.add(1.01)
            values.add(estimate.value())
        assert 2 <= len(values) <= 8

    def test_its_error_is_zero_before_the_first_and_if_nothing_varies(self) -> None:
        assert IterationTime().error() == 0.0
        assert time_of(1.0).error() == 0.0
        assert time_of(*[1.0] * 20).error() == 0.0

    def test_its_error_by_hand(self) -> None:
        # In turn: as far as can be told, not correlated with the one before but its opposite.
        values = [1.0, 1.2] * 8
        assert time_of(*values).error() == pytest.approx(statistics.stdev(values) / 4)
        # In rows of four: of 15 neighbours 12 are alike and 3 are opposites; 1/16 is put back.
        rows = [1.0, 1.0, 1.0, 1.0, 1.2, 1.2, 1.2, 1.2] * 2
        kept = (12 - 3) / 16 + 1 / 16
        inflated = math.sqrt((1 + kept) / (1 - kept))
        assert time_of(*rows).error() == pytest.approx(statistics.stdev(rows) / 4 * inflated)

    def test_its_error_tells_how_far_it_is_off(self) -> None:
        num = 60
        off, said = [], []
        for seed in range(200):
            random = Random(seed)
            estimate = time_of(*(random.gauss(1.0, 0.1) for _ in range(num)))
            estimate.update()
            off.append((estimate.value() or 0.0) - 1.0)
            said.append(estimate.error())
        true = math.sqrt(statistics.fmean(x * x for x in off))
        assert statistics.fmean(said) == pytest.approx(true, rel=0.25)


@given(mean=st.floats(0, 1e6), more=st.floats(0, 1e6), error=st.floats(0, 1e6))
def test_an_estimate_made_from_its_upper_limit_has_it(
    mean: float, more: float, error: float
) -> None:
    estimate = Estimate.with_upper(mean, mean + more, error=error)
    assert estimate.upper() == pytest.approx(mean + more)
    assert estimate.error <= error


def test_independent_errors_add_up_as_squares_do() -> None:
    assert Estimate(1.0, 3.0, doubt=2.0).plus_error(4.0) == Estimate(1.0, 5.0, doubt=2.0)
    mixed = Estimate(1.0, 0.4, doubt=0.8).blended(Estimate(5.0, 0.4, doubt=0.0), part=0.25)
    assert mixed == Estimate(2.0, pytest.approx(math.hypot(0.3, 0.1)), doubt=pytest.approx(0.6))


@pytest.mark.parametrize(
    ("mean", "may_be", "is_surely"),
    [
        (1.4, False, False),
        (1.5, True, False),
        (2.5, True, True),
        (4.6, True, False),
        (5.6, False, False),
    ],
)
def test_comparisons_of_an_estimate_allow_for_its_error(
    mean: float, may_be: bool, is_surely: bool
) -> None:
    estimate = Estimate(mean, 0.5, doubt=9.0)
    assert estimate.may_be_in(2.0, 5.0) == may_be
    assert estimate.is_in(2.0, 5.0) == is_surely


def test_recent_median_is_the_median_of_the_last_few() -> None:
    recent = RecentMedian(window=3)
    assert recent.value() is None
    for value in (9.0, 1.0, 2.0, 30.0):
        recent.add(value)
    assert recent.value() == 2.0
