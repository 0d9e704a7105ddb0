"""Which ends of runs are failures, and how often they come."""

from __future__ import annotations

import pytest

from checkfreq.policy.failure_rate import FailureRate
from checkfreq.story.failing import failure_rate
from checkfreq.story.model import Story
from tests.story.made import START_S, Event, began, event, killed_runs

LASTING_S = 600.0


def rate_of(events: list[Event]) -> FailureRate:
    story = Story()
    story.add_all(events)
    return failure_rate(story)


def after(events: list[Event], kind: str, **data: object) -> list[Event]:
    """The first of two runs ends with one more event."""
    return [*events[:2], event(kind, 1, START_S + LASTING_S, **data), *events[2:]]


def test_each_run_that_was_killed_is_a_failure_but_the_latest_may_go_on() -> None:
    assert rate_of(killed_runs(4)) == FailureRate(3, 4 * LASTING_S)
    assert rate_of([]) == FailureRate()


@pytest.mark.parametrize(
    ("kind", "data", "failures"),
    [
        *(("ended", {"how": how}, 0) for how in ("closed", "finished", "stopped")),
        ("ended", {"how": "failed"}, 1),
        ("ended", {"how": "failed", "error": "ValueError"}, 1),
        ("ended", {"how": "failed", "error": "KeyboardInterrupt"}, 0),
        ("stop", {"signal": "SIGTERM"}, 0),  # and killed then
    ],
)
def test_an_end_that_was_wanted_is_no_failure(
    kind: str, data: dict[str, str], failures: int
) -> None:
    assert rate_of(after(killed_runs(2), kind, **data)).failures == failures


def test_runs_of_less_than_a_minute_count_for_nothing() -> None:
    assert rate_of(killed_runs(5, lasting_s=59.0)) == FailureRate()


def test_what_the_latest_run_knew_counts_if_it_is_more_than_the_events() -> None:
    events = killed_runs(2)
    events += [{**began(0, START_S + 9e4), "failures_seen": 7, "running_s": 5e5}]
    assert rate_of(events) == FailureRate(7, 5e5)
    events[-1]["running_s"] = 5.0
    assert rate_of(events) == FailureRate(2, 2 * LASTING_S)
    events[-1] |= {"failures_seen": "many", "running_s": 5e5}
    assert rate_of(events) == FailureRate(2, 2 * LASTING_S)
