"""A trace is taken apart: known iterations and known costs of checkpoints are found again."""

from __future__ import annotations

import math
from itertools import cycle, islice
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from checkfreq.simulation.series import take_apart
from tests.simulation.made import recorded

T = 0.02
HELD, SLOWED = 0.004, (0.003, 0.002)
COST = HELD + sum(SLOWED)
#: A checkpoint every 20 iterations, each touching 8 and two in its aftermath.
AT = range(20, 400, 20)


def test_steady_iterations_and_costs_are_found_exactly(tmp_path: Path) -> None:
    series = take_apart(recorded(tmp_path, [T] * 400, at=AT))
    assert series.work_s == pytest.approx([T] * 400, abs=1e-6)
    assert [cost.index for cost in series.costs] == [*AT]
    for cost in series.costs:
        assert cost.held_s[0] == pytest.approx(HELD, abs=1e-6)
        assert cost.slowed_s[:2] == pytest.approx(SLOWED, abs=1e-6)
        assert cost.total_s == pytest.approx(COST, abs=1e-6)
        assert cost.tail_s == pytest.approx(0.15 - 0.01, abs=1e-6)
    assert series.rhythm == 1
    assert series.boundary_s == pytest.approx([1e-5] * 400, abs=1e-6)


@pytest.mark.parametrize("sigma", [0.05, 0.3])
def test_noise_leaves_the_mean_cost_as_it_is(tmp_path: Path, sigma: float) -> None:
    random = Random(3)
    work = [T * random.lognormvariate(0, sigma) for _ in range(6000)]
    series = take_apart(recorded(tmp_path, work, at=range(25, 6000, 25)))
    chance = 4 * sigma * T * math.sqrt(10 / 240)  # ten iterations each of 240 checkpoints
    assert fmean(cost.total_s for cost in series.costs) == pytest.approx(COST, abs=chance)
    assert fmean(series.work_s) == pytest.approx(fmean(work), rel=0.01)
    spread = math.sqrt(fmean((each - fmean(series.work_s)) ** 2 for each in series.work_s))
    assert spread == pytest.approx(sigma * T, rel=0.25)


def test_a_rhythm_is_found_and_compared_within_its_phase(tmp_path: Path) -> None:
    random = Random(5)
    beat = islice(cycle([T, T, T, 4 * T]), 3000)
    work = [value * random.lognormvariate(0, 0.02) for value in beat]
    series = take_apart(recorded(tmp_path, work, at=range(37, 3000, 37)))
    assert series.rhythm == 4
    assert fmean(cost.total_s for cost in series.costs) == pytest.approx(COST, rel=0.1)
    assert [round(value / T) for value in series.work_s[2000:2008]] == [1, 1, 1, 4, 1, 1, 1, 4]


@pytest.mark.parametrize("sigma", [0.0, 0.4])
def test_noise_is_no_rhythm(tmp_path: Path, sigma: float) -> None:
    random = Random(11)
    work = [T * random.lognormvariate(0, sigma) for _ in range(800)]
    assert take_apart(recorded(tmp_path, work, at=AT)).rhythm == 1


def test_checkpoints_that_failed_are_no_template_but_touch_iterations(tmp_path: Path) -> None:
    series = take_apart(recorded(tmp_path, [T] * 400, at=AT, failed={40, 60}))
    assert [cost.index for cost in series.costs] == [at for at in AT if at not in (40, 60)]
    assert series.work_s == pytest.approx([T] * 400, abs=1e-6)


def test_checkpoints_that_overlap_share_what_they_add(tmp_path: Path) -> None:
    work = [T] * 1000
    run = recorded(tmp_path, work, at=[at for at in range(40, 990, 40) for at in (at, at + 3)])
    costs = take_apart(run).costs
    assert sum(cost.total_s for cost in costs) == pytest.approx(len(costs) * COST, rel=0.01)
