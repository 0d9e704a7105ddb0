"""The failure rate and its limits, against published quantiles and intervals."""

from __future__ import annotations

import math

import pytest

from checkfreq.policy.failure_rate import (
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
        (1002, 0.5, 1001.333),  # an approximation, from the textbooks: n (1 - 2 / 9n) ^ 3
    ],
)
def test_quantiles_are_the_published_ones(
    degrees: int, upper_tail: float, published: float
) -> None:
    assert chi_square_quantile(1 - upper_tail, degrees) == pytest.approx(published, abs=5e-4)


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
    assert FailureRate(1, 10.0).more_than(FailureRate(5, 9.0))


@pytest.mark.parametrize("running_s", [0.0, math.inf])
def test_no_time_and_endless_time_are_no_rate(running_s: float) -> None:
    rate = FailureRate(5, running_s)
    assert (rate.mean_s, rate.mtbf_s) == (None, None)
    assert rate.facts()["mtbf_seen_low_s"] is None


def test_the_facts_of_runs_that_never_failed_are_unknown() -> None:
    assert {*FailureRate(0, HOUR_S).facts().values()} == {None}
    facts = FailureRate(3, HOUR_S).facts()
    assert (facts["failures_seen"], facts["mtbf_seen_s"]) == (3, 1200.0)
    assert facts["mtbf_seen_low_s"] == pytest.approx(HOUR_S / 7.754, rel=1e-3)
    assert facts["mtbf_seen_high_s"] == pytest.approx(HOUR_S / 0.818, rel=1e-3)


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (FailureRate(0, 30.0), "never in 30 s of training"),
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
        (3, math.inf, None),
        (3, "10", None),
    ],
)
def test_numbers_from_outside_are_checked(
    failures: object, running_s: object, expected: FailureRate | None
) -> None:
    assert rate_from(failures, running_s) == expected
