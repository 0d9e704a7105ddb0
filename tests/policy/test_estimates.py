"""Robust estimates over sliding windows."""

from __future__ import annotations

import pytest

from checkfreq.policy.estimates import Estimate, IterationTime


def time_of(*seconds: float) -> IterationTime:
    estimate = IterationTime()
    for value in seconds:
        estimate.add(value)
        estimate.value()
    return estimate


class TestIterationTime:
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
