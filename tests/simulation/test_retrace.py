"""Policies replayed over made traces, where what they should come to is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkfreq.simulation.deciders import FixedInterval
from checkfreq.simulation.retrace import (
    as_recorded,
    auto,
    ideal_interval,
    policy_of,
    retrace,
)
from checkfreq.simulation.series import Series, take_apart
from tests.simulation.made import recorded

T = 0.02
COST = 0.009  # see made.write_trace
#: 0.009 / (0.035 * 0.02) = 12.9 iterations, and a little for boundaries.
IDEAL = 13


@pytest.fixture
def steady(tmp_path: Path) -> Series:
    return take_apart(recorded(tmp_path, [T] * 2000, at=range(30, 2000, 30)))


def test_a_fixed_interval_costs_what_its_checkpoints_cost(steady: Series) -> None:
    done = retrace(steady, FixedInterval(50))
    assert [each.at for each in done.placed[:3]] == [49, 99, 149]
    assert done.interval_steps == 50
    assert done.work_s == pytest.approx(2000 * T, rel=1e-3)
    expected = COST / (50 * T) + 1e-5 / T
    assert done.overhead == pytest.approx(expected, rel=0.03)
    assert len(done.overheads) == 10
    assert done.overheads[-1] == done.overhead
    assert done.worst_overhead == pytest.approx(COST / (50 * T), rel=0.3)


def test_the_recorded_run_comes_out_as_it_was(steady: Series) -> None:
    done = as_recorded(steady)
    assert [each.at for each in done.placed] == [*range(30, 2000, 30)]
    assert {each.planned_steps for each in done.placed} == {10}
    whole_s = done.work_s + done.added_s
    assert whole_s == pytest.approx(sum(steady.recording.took_s), rel=1e-4)


def test_the_ideal_keeps_the_bound_and_one_less_does_not(steady: Series) -> None:
    ideal = ideal_interval(steady, max_overhead=0.035)
    assert ideal == pytest.approx(IDEAL, abs=1)
    assert retrace(steady, FixedInterval(ideal)).overhead <= 0.035
    assert retrace(steady, FixedInterval(ideal - 1)).overhead > 0.035
    assert ideal_interval(steady, max_overhead=0.0175) == pytest.approx(2 * ideal, abs=2)


def test_auto_comes_to_the_ideal_interval(steady: Series) -> None:
    done = auto(steady, policy_of(steady))
    assert done.interval_steps == pytest.approx(IDEAL, abs=2)
    assert done.overhead < 0.037
    assert done.planned_at(2000) == done.planned_steps
    assert done.planned_at(3) is None
