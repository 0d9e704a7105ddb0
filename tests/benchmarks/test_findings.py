"""Smallest intervals and winners, from costs and overheads that are known."""

from __future__ import annotations

import math

import pytest

from benchmarks.frequency.findings import Cost, Findings
from benchmarks.lab.estimate import Estimate, Smallest, median_interval


@pytest.mark.parametrize(
    ("values", "interval"),
    [
        ([5.0, 1.0, 2.0, 3.0, 4.0], (-math.inf, math.inf)),
        ([6.0, 1.0, 2.0, 3.0, 4.0, 5.0], (1.0, 6.0)),
        ([float(x) for x in range(1, 9)], (1.0, 8.0)),
        ([float(x) for x in range(1, 10)], (2.0, 8.0)),
        ([float(x) for x in range(1, 21)], (6.0, 15.0)),
    ],
)
def test_interval_of_the_median_is_the_tables(
    values: list[float], interval: tuple[float, float]
) -> None:
    assert median_interval(values) == interval


@pytest.mark.parametrize(
    ("cost_s", "busy_s", "by_cost", "by_storage"),
    [(0.035, 0.0, 10, 1), (0.0351, 0.2, 11, 2), (0.0, 0.31, 1, 4), (0.35, 0.3, 100, 3)],
)
def test_smallest_interval_keeps_the_bound_by_cost_and_by_storage(
    cost_s: float, busy_s: float, by_cost: int, by_storage: int
) -> None:
    found = Smallest.of(cost_s=cost_s, busy_s=busy_s, iteration_s=0.1, bound=0.035)
    assert (found.by_cost, found.by_storage) == (by_cost, by_storage)
    assert found.k == max(by_cost, by_storage)


def cost(k: int, *, by_storage: int = 1) -> Cost:
    smallest = Smallest(k, by_storage)
    return Cost(0.1, (0.1, 0.1), 0.2, (0.2, 0.2), smallest, iteration_s=0.1, num_saves=6)


def measured(mean: float, width: float = 0.001) -> Estimate:
    return Estimate(mean, width / 2, mean - width, mean + width)


def findings(**tried: Estimate) -> Findings:
    """``ours_5``: ours at k = 5."""
    found = Findings("ours", ["slow", "fast"], bound=0.035)
    found.costs = {"ours": cost(5), "slow": cost(90), "fast": cost(40, by_storage=3)}
    for name, estimate in tried.items():
        arm, _, k = name.partition("_")
        found.tried[arm, int(k)] = estimate
    return found


def test_our_smallest_interval_is_one_that_kept_the_bound_in_windows() -> None:
    verdict = findings(ours_5=measured(0.03)).verdict()
    assert (verdict.k, verdict.rival, verdict.k_rival) == (5, "fast", 40)
    assert verdict.ratio == 0.125
    assert verdict.met


def test_an_interval_shorter_than_costs_allow_counts_only_if_it_is_beyond_chance() -> None:
    assert findings(ours_3=measured(0.03, 0.02)).smallest_kept("ours") is None
    assert findings(ours_3=measured(0.03, 0.0051)).smallest_kept("ours") is None
    assert findings(ours_3=measured(0.03, 0.0049)).smallest_kept("ours") == 3
    assert findings(ours_5=measured(0.03, 0.02)).smallest_kept("ours") == 5


def test_a_peer_counts_with_the_smaller_of_its_measured_and_calculated_interval() -> None:
    found = findings(fast_40=measured(0.05), fast_60=measured(0.03), slow_30=measured(0.01))
    assert found.smallest("fast") == 40
    assert found.smallest("slow") == 30
    assert found.verdict().rival == "slow"


def test_at_an_equal_interval_ours_is_compared_with_the_lowest_other() -> None:
    at = {"slow_4": measured(0.5), "fast_4": measured(0.3, 0.1)}
    lower = findings(ours_4=measured(0.25), **at).equal(4)
    assert (lower.rival, lower.met, lower.is_apart) == ("fast", True, False)
    assert findings(ours_4=measured(0.1), **at).equal(4).is_apart
    assert not findings(ours_4=measured(0.4), **at).equal(4).met
