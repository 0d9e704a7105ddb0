"""When the last checkpoint must start: tables, and what measurements do to it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.policy.ending import NO_NEEDS, Expected, LastCheckpoint, Needs

SECONDS = st.floats(0.0, 1e4)
MARGIN_S = 2.0


def measured(*durable_s: float, gaps_s: tuple[float, ...] = ()) -> LastCheckpoint:
    last = LastCheckpoint()
    for seconds in durable_s:
        last.add_durable(seconds)
    for seconds in gaps_s:
        last.add_gap(seconds, after_epoch=False)
    return last


def needs(last: LastCheckpoint, *, at_epoch_end: bool = False, **known: object) -> Needs:
    return last.needs(at_epoch_end=at_epoch_end, **{"state_bytes": 0, **known})  # type: ignore[arg-type]


# ---- expected times


def test_a_single_value_counts_three_times_and_many_equal_ones_once() -> None:
    expected = Expected()
    assert expected.upper_s() is None
    expected.add(10.0)
    assert expected.upper_s() == 30.0
    for _ in range(50):
        expected.add(10.0)
    assert expected.upper_s() == pytest.approx(10.0, rel=1e-3)


@pytest.mark.parametrize("seconds", [math.nan, -1.0, 1e10])
def test_impossible_times_are_ignored(seconds: float) -> None:
    last = measured(1.0, seconds)
    last.add_gap(seconds, after_epoch=False)
    assert needs(last).durable_s == 3.0 + MARGIN_S


# ---- needs


def test_before_anything_is_measured_a_slow_disk_is_assumed() -> None:
    assert not LastCheckpoint().is_measured
    assert needs(LastCheckpoint()) == Needs(5.0 + MARGIN_S, 1.0)
    assert needs(LastCheckpoint(), state_bytes=10**9).durable_s == 15.0 + MARGIN_S


def test_what_an_earlier_run_measured_serves_until_this_one_has() -> None:
    assert needs(LastCheckpoint(), cached_s=20.0).durable_s == 60.0 + MARGIN_S
    assert needs(LastCheckpoint(), cached_s=0.0).durable_s == 5.0 + MARGIN_S
    last = measured(1.0)
    assert last.is_measured
    assert needs(last, cached_s=20.0, state_bytes=10**12).durable_s == 3.0 + MARGIN_S


def test_of_two_ranks_the_slower_one_decides() -> None:
    assert Needs(1.0, 4.0).with_(Needs(3.0, 2.0)) == Needs(3.0, 4.0)
    assert Needs(1.0, 4.0).with_(NO_NEEDS) == Needs(1.0, 4.0)


def test_what_is_in_flight_comes_first() -> None:
    last = measured(*[10.0] * 100)
    assert needs(last).durable_s == pytest.approx(10.0 + MARGIN_S)
    assert needs(last, ages_s=(4.0,)).durable_s == pytest.approx(16.0 + MARGIN_S)
    assert needs(last, ages_s=(9.0, 1.0)).durable_s == pytest.approx(20.0 + MARGIN_S)


def test_one_long_iteration_hardly_counts_and_several_do() -> None:
    last = measured(1.0, gaps_s=(1.0,) * 100)
    last.add_gap(600.0, after_epoch=False)
    assert needs(last).gap_s < 6.0
    for _ in range(5):
        last.add_gap(600.0, after_epoch=False)
    assert needs(last).gap_s >= 600.0


def test_a_validation_after_the_last_epoch_is_expected_after_this_one() -> None:
    last = measured(1.0, gaps_s=(0.1,) * 50)
    at_first = needs(last, at_epoch_end=True).gap_s
    assert at_first == pytest.approx(0.1, rel=0.1)
    last.add_gap(90.0, after_epoch=True)
    assert needs(last, at_epoch_end=True).gap_s == 270.0
    assert needs(last).gap_s == at_first


# ---- the rule


@pytest.mark.parametrize(
    ("left_s", "starts"), [(100.0, False), (12.1, False), (12.0, True), (3.0, True), (-5.0, True)]
)
def test_it_starts_when_the_next_boundary_would_be_too_late(left_s: float, starts: bool) -> None:
    assert Needs(durable_s=10.0, gap_s=2.0).must_start(left_s) is starts


@given(left_s=SECONDS, durable_s=SECONDS, gap_s=SECONDS)
def test_whoever_looks_again_when_told_to_is_in_time(
    left_s: float, durable_s: float, gap_s: float
) -> None:
    """If iterations take no longer than expected: one boundary more is always allowed for."""
    known = Needs(durable_s, gap_s)
    num = known.boundaries_to_look(left_s)
    assert num >= 1
    if not known.must_start(left_s):
        assert left_s - num * gap_s >= durable_s or num == 1
