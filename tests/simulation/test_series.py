"""A trace is taken apart: known iterations and known costs of checkpoints are found again."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from checkfreq.errors import ConfigError
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


def test_the_whole_time_is_that_of_the_trace(tmp_path: Path) -> None:
    random = Random(7)
    work = [T * random.lognormvariate(0, 0.3) for _ in range(4000)]
    run = recorded(tmp_path, work, at=range(25, 4000, 25))
    series = take_apart(run)
    parts = [*series.work_s, *series.boundary_s, *(cost.total_s for cost in series.costs)]
    assert math.fsum(parts) == pytest.approx(math.fsum(run.took_s), rel=0.01)


@pytest.mark.parametrize("sigma", [0.05, 0.15, 0.3])
def test_noise_leaves_the_mean_cost_as_it_is(tmp_path: Path, sigma: float) -> None:
    random = Random(3)
    work = [T * random.lognormvariate(0, sigma) for _ in range(6000)]
    series = take_apart(recorded(tmp_path, work, at=range(25, 6000, 25)))
    chance = 4 * sigma * T * math.sqrt(10 / 240)  # ten iterations each of 240 checkpoints
    assert fmean(cost.total_s for cost in series.costs) == pytest.approx(COST, abs=chance)
    assert fmean(series.work_s) == pytest.approx(fmean(work), rel=0.01)
    spread = math.sqrt(fmean((each - fmean(series.work_s)) ** 2 for each in series.work_s))
    assert spread == pytest.approx(sigma * T, rel=0.25)


def test_a_second_load_is_no_checkpoint_s_cost(tmp_path: Path) -> None:
    work = [3 * T if 1000 <= at < 1400 else T for at in range(3000)]
    series = take_apart(recorded(tmp_path, work, at=range(40, 3000, 40)))
    inside = [cost.total_s for cost in series.costs if 1040 <= cost.index < 1360]
    assert fmean(inside) == pytest.approx(COST, rel=0.1)
    assert sum(series.work_s) == pytest.approx(sum(work), rel=0.005)


def test_a_rhythm_is_found_and_compared_within_its_phase(tmp_path: Path) -> None:
    random = Random(5)
    beat = islice(cycle([T, T, T, 4 * T]), 3000)
    work = [value * random.lognormvariate(0, 0.02) for value in beat]
    series = take_apart(recorded(tmp_path, work, at=range(37, 3000, 37)))
    assert series.rhythm == 4
    assert fmean(cost.total_s for cost in series.costs) == pytest.approx(COST, rel=0.1)
    assert [round(value / T) for value in series.work_s[2000:2008]] == [1, 1, 1, 4, 1, 1, 1, 4]


@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.4])
def test_noise_is_no_rhythm(tmp_path: Path, sigma: float) -> None:
    random = Random(11)
    work = [T * random.lognormvariate(0, sigma) for _ in range(800)]
    assert take_apart(recorded(tmp_path, work, at=AT)).rhythm == 1


def test_costs_that_change_are_those_of_their_time(tmp_path: Path) -> None:
    run = recorded(
        tmp_path, [T] * 4000, at=range(40, 4000, 40), scale=lambda at: 3.0 if at > 2000 else 1.0
    )
    costs = take_apart(run).costs
    assert costs[10].total_s == pytest.approx(COST, rel=0.01)
    assert costs[-10].total_s == pytest.approx(3 * COST, rel=0.01)
    assert costs[-10].tail_s == pytest.approx(0.44, rel=0.01)


def test_checkpoints_that_failed_are_no_template_but_touch_iterations(tmp_path: Path) -> None:
    series = take_apart(recorded(tmp_path, [T] * 400, at=AT, failed={40, 60}))
    assert [cost.index for cost in series.costs] == [at for at in AT if at not in (40, 60)]
    assert series.work_s == pytest.approx([T] * 400, abs=1e-6)


def test_checkpoints_that_overlap_share_what_they_add(tmp_path: Path) -> None:
    work = [T] * 1000
    run = recorded(tmp_path, work, at=[at for at in range(40, 990, 40) for at in (at, at + 3)])
    costs = take_apart(run).costs
    assert sum(cost.total_s for cost in costs) == pytest.approx(len(costs) * COST, rel=0.01)


def test_checkpoints_may_be_recorded_in_the_order_of_their_ends(tmp_path: Path) -> None:
    run = recorded(tmp_path, [T] * 400, at=AT)
    expected = take_apart(run).costs
    run.checkpoints.reverse()
    assert take_apart(run).costs == expected


def test_more_checkpoints_at_a_time_than_slots_are_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path, [T] * 400, at=AT)
    run.checkpoints[:] = [replace(run.checkpoints[0], durable_s=1e6)] * 100
    with pytest.raises(ConfigError, match=r"at most 16 checkpoints at a time, found more on avera"):
        take_apart(run)


def test_a_run_without_clean_iterations_says_what_to_record(tmp_path: Path) -> None:
    run = recorded(tmp_path, [T] * 100, at=range(0, 100, 4))
    with pytest.raises(ConfigError, match=r"at least 8 iterations that no checkpoint touched, fou"):
        take_apart(run)


def test_a_run_without_checkpoints_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one checkpoint that became durable, found non"):
        take_apart(recorded(tmp_path, [T] * 100))
