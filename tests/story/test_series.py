"""The series of a report's charts: few points, whatever the story, and nothing left out of them."""

from __future__ import annotations

import itertools
import math

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from checkfreq.story.model import Story
from checkfreq.story.report.charts import CHARTS, Style
from checkfreq.story.report.series import Point, Series, decimated, thinned
from tests.story.made import START_S, Event, began, committed, event, many, plan, two_runs

_TIMELINE = next(chart for chart in CHARTS if chart.name == "timeline")


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


@pytest.mark.parametrize("num", [0, 1, 300, 301, 10_000])
def test_what_is_thinned_keeps_its_ends_and_its_order(num: int) -> None:
    kept = thinned(range(num))
    assert len(kept) <= 301
    assert kept == sorted(kept)
    assert (kept[:1], kept[-1:]) == ([0][:num], [num - 1] if num else [])


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


def test_what_was_written_in_all_is_the_last_point() -> None:
    series = series_of([*many(2000)])
    saves = [save for _, save in series.story.saves]
    assert series.written[-1][1] == sum(save.written_bytes for save in saves)
    assert series.uploaded[-1][1] == 10**9 * len([*filter(_is_upload, many(2000))])


def _is_upload(one: Event) -> bool:
    return one["kind"] == "uploaded"


@pytest.mark.parametrize(("width", "apart_s"), [(9.0, 1.0), (3.7, 0.2)])
def test_numbers_above_the_timeline_do_not_touch(width: float, apart_s: float) -> None:
    starts = [START_S + 40 * (index // 2) + apart_s * (index % 2) for index in range(12)]
    saves = [committed(3_999_000 + 40 * index, at_s) for index, at_s in enumerate(starts)]
    series = series_of([began(3_998_000, START_S - 10), *saves])
    figure = _TIMELINE.figure(series, Style(width, for_page=False))
    assert figure is not None
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in figure.axes[0].texts]
    assert len(boxes) >= 3
    assert boxes[0].x0 >= 0
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_the_storage_is_drawn_in_the_unit_in_which_it_is_told() -> None:
    storage = next(chart for chart in CHARTS if chart.name == "storage")
    figure = storage.figure(series_of(two_runs()), Style(9.0, for_page=False))
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_ylabel() == "GiB"
    assert max(axes.lines[0].get_ydata()) == pytest.approx(4e9 / 2**30)
