"""The failure rate and its limits, against published quantiles and intervals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkfreq.policy.failure_rate import (
    CONFIDENCE,
    LEAST_FAILURES,
    FailureRate,
    chi_square_quantile,
    rate_from,
)

HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("degrees", "upper_tail", "published"),
    [  # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.4: critical values
        (2, 0.05, 5.991),
        (4, 0.05, 9.488),
        (20, 0.001, 45.315),
        (100, 0.01, 135.807),
        (2, 0.99, 0.020),
        (50, 0.99, 29.707),
        (100, 0.95, 77.929),
    ],
)
def test_quantiles_are_the_published_ones(
    degrees: int, upper_tail: float, published: float
) -> None:
    assert chi_square_quantile(1 - upper_tail, degrees) == pytest.approx(published, abs=5e-4)


@pytest.mark.parametrize("part", [0.05, 0.5, 0.95])
def test_the_approximation_goes_on_where_the_sum_ends(part: float) -> None:
    exact, near = chi_square_quantile(part, 1000), chi_square_quantile(part, 1002)
    assert near - exact == pytest.approx(2.0, abs=0.15)


@pytest.mark.parametrize(
    ("events", "low", "high"),
    [  # Garwood 1936: 90 % limits of a Poisson mean
        (0, 0.0, 2.996),
        (2, 0.355, 6.296),
        (10, 5.425, 16.962),
        (20, 13.255, 29.062),
    ],
)
def test_limits_are_those_of_a_poisson_mean(events: int, low: float, high: float) -> None:
    shortest_s, longest_s = FailureRate(events, HOUR_S).limits_s()
    assert HOUR_S / shortest_s == pytest.approx(high, abs=1e-3)
    assert (0.0 if longest_s == math.inf else HOUR_S / longest_s) == pytest.approx(low, abs=1e-3)


def test_it_is_planned_with_from_the_third_failure_on() -> None:
    assert LEAST_FAILURES == 3
    assert [FailureRate(n, HOUR_S).mtbf_s for n in range(5)] == [None, None, None, 1200.0, 900.0]
    assert FailureRate(1, HOUR_S).mean_s == HOUR_S


@pytest.mark.parametrize("running_s", [0.0, math.inf])
def test_no_time_and_endless_time_are_no_rate(running_s: float) -> None:
    rate = FailureRate(5, running_s)
    assert (rate.mean_s, rate.mtbf_s) == (None, None)
    assert rate.facts()["mtbf_seen_low_s"] is None


def test_what_was_seen_for_longer_counts() -> None:
    assert FailureRate(1, 10.0).more_than(FailureRate(5, 9.0))
    assert not FailureRate(1, 9.0).more_than(FailureRate(0, 9.0))


def test_the_facts_of_runs_that_never_failed_are_unknown() -> None:
    assert {*FailureRate(0, HOUR_S).facts().values()} == {None}
    facts = FailureRate(3, HOUR_S).facts()
    assert (facts["failures_seen"], facts["mtbf_seen_s"]) == (3, 1200.0)
    assert facts["mtbf_seen_low_s"] == pytest.approx(HOUR_S / 7.754, rel=1e-3)
    assert facts["mtbf_seen_high_s"] == pytest.approx(HOUR_S / 0.818, rel=1e-3)


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (FailureRate(0, 300.0), "never in 5.0 min of training"),
        (FailureRate(2, 0.0), "2 times in 0 s of training"),
        (
            FailureRate(1, 86_400.0),
            "once in 24.0 h of training: every 24.0 h (90 % confidence: 5.1 h to 19.5 d)",
        ),
        (
            FailureRate(10, 1e6),
            "10 times in 11.6 d of training: every 27.8 h (90 % confidence: 16.4 h to 2.1 d)",
        ),
    ],
)
def test_it_is_said_in_a_sentence(rate: FailureRate, said: str) -> None:
    assert rate.explain() == said


@pytest.mark.parametrize(
    ("failures", "running_s", "expected"),
    [
        (3, 10.0, FailureRate(3, 10.0)),
        (True, 10.0, None),
        (-1, 10.0, None),
        (1 << 40, 10.0, None),
        (3, math.inf, None),
        (3, "10", None),
    ],
)
def test_numbers_from_outside_are_checked(
    failures: object, running_s: object, expected: FailureRate | None
) -> None:
    assert rate_from(failures, running_s) == expected


@settings(max_examples=20)
@given(st.integers(0, 60), st.floats(1.0, 1e9))
def test_limits_enclose_the_mean_and_close_in_on_it(failures: int, running_s: float) -> None:
    low_s, high_s = FailureRate(failures, running_s).limits_s()
    mean_s = running_s / failures if failures else math.inf
    assert 0 < low_s < mean_s <= high_s
    more_low_s, more_high_s = FailureRate(2 * failures, 2 * running_s).limits_s()
    assert more_high_s / more_low_s <= high_s / low_s or not failures
    assert CONFIDENCE == 0.9
