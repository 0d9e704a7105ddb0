"""The watch: who is asked when, and what is told."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from checkfreq.notices.source import EndsAt
from checkfreq.notices.watch import News, NoticeWatch
from tests.notices.conftest import SetClock


@dataclass
class Scripted:
    """A source that answers what a test put there."""

    ends: EndsAt | Exception | None = None
    name: str = "slurm"
    pause_s: float = 10.0
    num_polled: int = field(default=0, init=False)

    def poll(self) -> EndsAt | None:
        self.num_polled += 1
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends


@pytest.fixture
def told() -> list[News]:
    return []


def watch(told: list[News], clock: SetClock, *sources: Scripted) -> NoticeWatch:
    return NoticeWatch(sources, tell=told.append, clock=clock.clock())


def test_each_source_is_asked_when_its_pause_is_over(clock: SetClock, told: list[News]) -> None:
    often, seldom = Scripted(pause_s=5.0), Scripted(name="aws", pause_s=60.0)
    looking = watch(told, clock, often, seldom)
    assert looking.look() == 5.0
    clock.pass_(5.0)
    assert looking.look() == 5.0
    assert (often.num_polled, seldom.num_polled) == (2, 1)
    clock.pass_(55.0)
    looking.look()
    assert (often.num_polled, seldom.num_polled) == (3, 2)


@pytest.mark.parametrize(("left_s", "at_s"), [(90.0, 590.0), (None, None)])
def test_the_end_is_told_on_the_clock_that_does_not_jump_if_it_has_a_time(
    clock: SetClock, told: list[News], left_s: float | None, at_s: float | None
) -> None:
    ends = EndsAt("slurm", left_s and clock.unix_s + left_s, "why")
    watch(told, clock, Scripted(ends)).look()
    assert told == [News("slurm", ends, at_s)]


def test_only_what_is_new_is_told_and_a_second_is_not(clock: SetClock, told: list[News]) -> None:
    source = Scripted(EndsAt("slurm", 1_000_100.0, "why"))
    looking = watch(told, clock, source)
    for at_unix_s in (1_000_100.0, 1_000_101.5, 1_000_099.0, 1_000_103.0):
        source.ends = EndsAt("slurm", at_unix_s, "why")
        looking.look()
        clock.pass_(10.0)
    assert [news.ends and news.ends.at_unix_s for news in told] == [1_000_100.0, 1_000_103.0]


def test_that_there_is_none_is_told_once_and_so_is_one_that_is_taken_back(
    clock: SetClock, told: list[News]
) -> None:
    source = Scripted()
    looking = watch(told, clock, source)
    ends = EndsAt("slurm", 1_000_100.0, "why")
    for source.ends in (None, None, ends, None, None):
        looking.look()
        clock.pass_(10.0)
    assert [news.ends for news in told] == [None, ends, None]


def test_a_source_that_fails_silences_no_other_and_is_told_of_the_third_time(
    clock: SetClock, told: list[News]
) -> None:
    ends = EndsAt("aws", 1_000_100.0, "why")
    broken = Scripted(RuntimeError("a bug"))
    looking = watch(told, clock, broken, Scripted(ends, name="aws"))
    for _ in range(2):
        looking.look()
        clock.pass_(10.0)
    assert [news.source for news in told] == ["aws"]
    for _ in range(3):
        looking.look()
        clock.pass_(10.0)
    broken.ends = None
    looking.look()
    assert told[1:] == [
        News("slurm", None, unanswered="RuntimeError: a bug"),
        News("slurm", None),
    ]
