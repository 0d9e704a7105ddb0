"""The series of a report's charts: few points, whatever the story, and nothing left out of them."""

from __future__ import annotations

import math

from checkfreq.story.model import Story
from checkfreq.story.report.series import Point, Series, decimated
from tests.story.made import START_S, Event, began, committed, event, plan, two_runs


def series_of(events: list[Event]) -> Series:
    story = Story()
    story.add_all(events)
    return Series(story)


def many_runs(num: int, *, saves: int = 6) -> list[Event]:
    events, at_s, step = [], START_S, 0
    for _ in range(num):
        at_s += 50.0
        events += [event("restored", step, at_s, source="directory"), began(step, at_s)]
        events.append(plan(step, at_s))
        for _ in range(saves):
            at_s, step = at_s + 10.0, step + 40
            events.append(committed(step, at_s))
    return events


def test_what_is_decimated_keeps_its_extremes_where_they_were() -> None:
    points: list[Point] = [(float(at), 1.0) for at in range(10_000)]
    points[4321] = (4321.0, 9.0)
    points[4322] = (4322.0, -9.0)
    kept = decimated(points)
    assert len(kept) <= 301
    assert {points[4321], points[4322]} <= {*kept}
    assert kept == sorted(kept)
    assert kept[-1] == points[-1]


def test_many_runs_are_as_few_points_as_one() -> None:
    series = series_of(many_runs(700))
    lines = ("progress", "lost", "commits", "intervals", "overheads", "bounds", "written")
    for name in lines:
        points = getattr(series, name)
        assert 100 <= len(points) <= 700, name
        times = [at_s for at_s, _ in points if not math.isnan(at_s)]
        assert times == sorted(times), name


def test_nothing_is_drawn_as_lost_before_a_run_for_which_nothing_was() -> None:
    ended = [event("ended", 120, START_S + 40, how="closed")]
    began = [event("restored", 120, START_S + 99, source="directory")]
    assert series_of([*two_runs()[:5], *began]).lost
    assert not series_of([{**one, "at_step": 120} for one in two_runs()[:5]] + ended + began).lost
