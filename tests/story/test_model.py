"""The story that events tell, and the figures of a moment."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from checkfreq.persist.frames import Stage, Status
from checkfreq.story.facts import facts, time_spent
from checkfreq.story.figures import State, figures
from checkfreq.story.model import Story
from tests.story.made import START_S, began, committed, event, two_runs

HELD = Status(pid=7, step=170, stage=Stage.LOST, num_bytes=1 << 30, left_s=299.0)


def story_of(events: list[dict[str, Any]]) -> Story:
    story = Story()
    story.add_all(events)
    return story


def test_runs_are_told_apart_and_what_was_lost_between_them_is_known() -> None:
    story = story_of(two_runs())
    first, second = story.runs
    assert [save.step for save in first.saves] == [40, 80, 120]
    assert (first.first_step, first.reached_step, first.how) == (0, 161, "")
    assert second.restore is not None
    assert (second.first_step, second.max_overhead) == (120, 0.035)
    loss = story.loss(second)
    assert loss is not None
    assert (loss.least_steps, loss.steps, loss.most_steps) == (41, 61, 81)
    assert loss.work_s == pytest.approx(61 * 0.25 * 1.031)
    assert story.down_s(second) == pytest.approx(100.0 - 42.0)
    assert story.loss(first) is None


def test_a_run_that_ended_has_lost_nothing() -> None:
    last = {**committed(40, START_S + 10), "at_step": 40}
    ended = [began(0, START_S), last, event("ended", 40, START_S + 15, how="closed")]
    again = [event("restored", 40, START_S + 99, source="directory"), began(40, START_S + 99)]
    story = story_of([*ended, *again])
    loss = story.loss(story.runs[1])
    assert loss is not None
    assert (loss.least_steps, loss.most_steps) == (0, 0)
    assert story.runs[0].how == "closed"


def test_how_far_a_killed_run_got_is_told_by_the_time_of_its_death() -> None:
    events = two_runs()[:5]
    told_s = events[-1]["time_unix_s"]
    events += [
        event("killed", 120, told_s + 20 * 0.25 * 1.031 + 0.01),
        event("memory_kept", 120, told_s + 5.2),
        event("uploaded", 120, told_s + 60.0, after_trainer_death=True),
        *two_runs()[6:8],
    ]
    story = story_of(events)
    loss = story.loss(story.runs[1])
    assert loss is not None
    assert (loss.least_steps, loss.steps, loss.most_steps) == (12, 12 + 20, 12 + 40)
    assert story.down_s(story.runs[1]) == pytest.approx(100.0 - 33.2 - 5.165)


def test_a_run_whose_death_was_recorded_was_killed_although_its_worker_holds_the_directory() -> (
    None
):
    story = story_of([*two_runs(), event("killed", 160, START_S + 126.0)])
    now = figures(story, now_s=START_S + 127.0, is_held=True, memory=HELD)
    assert now.state is State.KILLED
    assert (now.memory_step, now.memory_left_s) == (170, 299.0)
    assert (now.lost_least_steps, now.lost_steps, now.lost_most_steps) == (2, 42, 42)


def test_events_of_an_earlier_version_make_runs_too() -> None:
    events = [one for one in two_runs() if one["kind"] != "began"]
    for one in events:
        for name in ("started_monotonic_s", "at_step"):
            one.pop(name, None)
    story = story_of(events)
    assert len(story.runs) == 2


def test_the_time_adds_up() -> None:
    spent = time_spent(story_of(two_runs()))
    assert sum(spent.values()) == pytest.approx(120.0)
    lost_s = 61 * 0.25 * 1.031
    assert spent["lost"] == pytest.approx(lost_s)
    assert spent["down"] == pytest.approx(58.0)


def test_the_figures_of_a_run_that_goes_on() -> None:
    story = story_of(two_runs())
    now = figures(story, now_s=START_S + 125.0, is_held=True, being_written_step=200)
    assert now.state is State.TRAINING
    assert (now.last_durable_step, now.uploaded_step, now.being_written_step) == (160, 160, 200)
    step_s = 0.25 * 1.031
    assert now.step == 172 + int((125.0 - 114.2) / step_s)
    assert now.is_estimated
    assert now.next_due_step == 240
    assert now.at_risk_steps == now.step - 160
    assert now.at_risk_s == pytest.approx(14.0, abs=0.3)
    assert now.used_of_bound == pytest.approx(0.031 / 0.035)
    assert (now.num_committed, now.num_failed, now.num_failed_in_row) == (4, 1, 0)


def test_a_run_whose_lock_nobody_holds_was_killed_and_one_without_news_for_long_is_silent() -> None:
    story = story_of(two_runs())
    assert figures(story, now_s=START_S + 125.0, is_held=False).state is State.KILLED
    assert figures(story, now_s=START_S + 900.0, is_held=None).state is State.SILENT
    assert figures(story, now_s=START_S + 900.0, is_held=True).state is State.SILENT


@pytest.mark.parametrize("how", ["closed", "stopped", "finished", "failed"])
def test_a_run_says_how_it_ended(how: str) -> None:
    story = story_of([*two_runs(), event("ended", 200, START_S + 130, how=how)])
    now = figures(story, now_s=START_S + 200.0, is_held=None)
    assert now.state.value == how
    assert now.step == 200


def test_any_field_may_hold_anything() -> None:
    generator = random.Random(18)
    odd = [None, True, -1, 1e300, "x" * 9000, "\x1b[2J<script>", [], {}, [1], {"a": 1}, math.nan]
    for _ in range(100):
        story = Story()
        for one in two_runs():
            name = generator.choice([*one])
            story.add({**one, name: generator.choice(odd), "costs": generator.choice(odd)})
        now = figures(story, now_s=START_S, is_held=generator.choice([True, False, None]))
        facts(story, now)
