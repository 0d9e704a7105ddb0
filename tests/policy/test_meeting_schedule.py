"""When ranks meet next: often enough even if iterations become slower, and within the bound."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.meeting_schedule import MeetingSchedule
from checkfreq.policy.tuner import RateTuner
from tests.policy.runs import Costs, Run

NEVER_DUE = 10**9


def steps(schedule: MeetingSchedule | None = None, **changes: Any) -> int:
    asked: dict[str, Any] = {
        "due_steps": NEVER_DUE,
        "iteration_s": 0.25,
        "every_s": 1.0,
        "since_last": 5000,
        "bound": 0.04,
    }
    return (schedule or MeetingSchedule()).steps(**{**asked, **changes})


def met(*seconds: float) -> MeetingSchedule:
    schedule = MeetingSchedule()
    for each in seconds:
        schedule.met(each)
    return schedule


@pytest.mark.parametrize(
    ("cost_s", "asked", "expected"),
    [
        pytest.param(0.0, {}, 4, id="once in the time given"),
        pytest.param(0.0, {"due_steps": 3}, 3, id="where a checkpoint may be due"),
        pytest.param(0.0, {"iteration_s": 30.0}, 1, id="at each boundary if iterations are long"),
        pytest.param(0.0, {"iteration_s": None}, 1, id="or of unknown length"),
        pytest.param(0.0, {"iteration_s": -1e-6}, 1, id="or of none"),
        pytest.param(0.0, {"iteration_s": 1e-4}, 100, id="not far: they may become slower"),
        pytest.param(0.001, {"iteration_s": 1e-6}, 1000, id="not out of reach"),
        # 1 ms of a hundredth of the time: 100 ms apart, whatever is due
        pytest.param(0.001, {"iteration_s": 0.005, "due_steps": 1}, 20, id="a quarter of it"),
        pytest.param(0.02, {"iteration_s": 0.01}, 200, id="the bound before the time given"),
        pytest.param(0.2, {}, 40, id="within ten times the time given, if half of the bound pays"),
        pytest.param(0.4, {}, 80, id="half of the bound"),
        pytest.param(60.0, {}, 240, id="within sixty times the time given, whatever they cost"),
    ],
)
def test_ranks_meet_after_so_many_steps(
    cost_s: float, asked: dict[str, Any], expected: int
) -> None:
    assert steps(met(cost_s) if cost_s else None, **asked) == expected


def test_the_distance_at_most_doubles_from_one_meeting_to_the_next() -> None:
    assert [steps(iteration_s=0.001, since_last=last) for last in (0, 1, 8)] == [1, 2, 16]


def test_a_meeting_that_waited_for_a_busy_rank_is_not_typical_and_is_charged_in_part() -> None:
    schedule = met(0.001, 0.001, 0.001)
    assert schedule.met(50.0) == 0.004
    assert schedule.met(-1.0) == 0.0  # is ignored
    assert schedule.cost_s == 0.001


def ranks(iteration_s: float, meeting_s: float, *, bound: float = 0.035, **costs: float) -> Run:
    costs = {"stall_s": 0.3 * iteration_s, "copy_s": 0.0, "durable_s": 0.5 * iteration_s, **costs}
    tuner = RateTuner(FrequencyPolicy(max_overhead=bound))
    return Run(tuner, costs=Costs(**costs), iteration_s=iteration_s, meeting_s=meeting_s)


@pytest.mark.no_cover  # long runs, of what shorter ones cover
@pytest.mark.parametrize(("stall_s", "meeting_s"), [(0.0005, 0.004), (0.01, 0.0008), (1.0, 0.0002)])
def test_the_bound_holds_with_meetings_however_short_iterations_are(
    stall_s: float, meeting_s: float
) -> None:
    played = ranks(0.005, meeting_s, stall_s=stall_s)
    played.play(8000)
    first = max(stall_s, played.costs_s["1"])  # had to be taken, and told what one costs
    allowed_s = 0.035 * played.clean_s + 2 * first + 16 * meeting_s  # those at the start
    assert played.true_s <= allowed_s
    assert played.tuner.overhead_s == pytest.approx(played.true_s, rel=0.05)


def test_ranks_meet_seldom_while_a_checkpoint_is_withheld() -> None:
    played = ranks(0.005, 0.0008, stall_s=1.0)  # a long time to earn
    played.play(400)
    played.told.clear()
    begin = len(played.met)
    played.play(2000)
    assert not played.taken[1:]
    assert len(played.met) - begin <= 2000 / 18 + 1  # 0.8 ms of a quarter of the bound
    assert max(after - before for before, after in pairwise(played.met)) <= 200  # 1 s


@given(
    iteration_s=st.floats(1e-9, 1e9),
    cost_s=st.floats(0, 1e9),
    due_steps=st.integers(1, 10**18),
    since_last=st.integers(0, 10**9),
    every_s=st.floats(1e-3, 1e6),
)
def test_there_is_always_a_next_meeting(
    iteration_s: float, cost_s: float, due_steps: int, since_last: int, every_s: float
) -> None:
    asked = steps(
        met(cost_s),
        iteration_s=iteration_s,
        due_steps=due_steps,
        since_last=since_last,
        every_s=every_s,
    )
    assert 1 <= asked <= max(1, 2 * since_last)
