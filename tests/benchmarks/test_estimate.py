"""The statistics of paired windows, with answers known beforehand."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.lab.estimate import (
    Estimate,
    Sample,
    estimate,
    sample,
    t_975,
    undisturbed,
)


def test_a_window_is_compared_with_the_mean_of_its_neighbours() -> None:
    found = sample(seconds=11.5, iterations=10, covered=10, clean_s=[1.0, 1.2])
    assert found.cost_s == pytest.approx(0.5)
    assert found.base_s == pytest.approx(11.0)


def test_interval_of_independent_samples_is_students() -> None:
    costs = [0.1, 0.4, 0.1, 0.4, 0.1, 0.4]  # successive ones differ: no positive covariance
    found = estimate([Sample(cost, 10.0) for cost in costs])
    deviation = math.sqrt(6 * 0.015**2 / 5)
    assert found.mean == pytest.approx(0.025)
    assert found.stderr == pytest.approx(deviation / math.sqrt(6))
    assert found.half_width == pytest.approx(2.571 * found.stderr, rel=0.01)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(400):
        clean_s = [1.0 + rng.gauss(0, 0.05) for _ in range(31)]
        samples = [
            sample(
                seconds=1.03 + rng.gauss(0, 0.05),
                iterations=1,
                covered=1,
                clean_s=clean_s[index : index + 2],
            )
            for index in range(30)
        ]
        found = estimate(samples)
        covered += found.low <= 0.03 <= found.high
    assert 0.92 <= covered / 400 <= 0.99


@pytest.mark.parametrize(
    ("freedom", "table"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (60, 2.0003)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, table: float) -> None:
    assert t_975(freedom) == pytest.approx(table, rel=0.002)


@pytest.mark.parametrize(
    ("mean", "high", "meets"),
    [(0.034, 0.039, True), (0.036, 0.037, False), (0.034, 0.0401, False), (0.035, 0.04, True)],
)
def test_meeting_a_bound_is_a_matter_of_the_estimate_and_its_upper_limit(
    mean: float, high: float, meets: bool
) -> None:
    assert Estimate(mean, 0.001, 0.0, high).meets(0.035) == meets


def test_rounds_in_which_other_processes_used_the_cpu_are_identified() -> None:
    assert undisturbed([0.01, 0.9, 0.02, 0.0, 0.11]) == [True, False, True, True, True]
