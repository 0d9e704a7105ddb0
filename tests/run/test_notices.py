"""The board: which notice is in force, whatever the clocks do."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from checkfreq import CFConfig
from checkfreq.persist import protocol as p
from checkfreq.policy.ending import Needs
from checkfreq.run.interrupt import StopNotice
from checkfreq.run.notices import LastMoment, NoticeBoard, RunEnd, Stop


def seen(
    source: str = "slurm", *, at_unix_s: float = 1000.0, at_s: float = 100.0, why: str = "why"
) -> p.NoticeSeen:
    return p.NoticeSeen(source, why, at_unix_s, at_s)


def at_s(board: NoticeBoard) -> float | None:
    return None if board.earliest is None else board.earliest.at_s


def test_the_earliest_end_is_in_force() -> None:
    board = NoticeBoard()
    board.note(p.NoticeSeen("aws", "AWS recommends", None, None))  # without a time it is news
    assert board.take_news() == ["aws: AWS recommends; training goes on"]
    assert board.earliest is None
    board.note(seen("slurm", at_s=100.0))
    board.note(seen("aws", at_s=50.0))
    board.note(seen("deadline", at_s=70.0))
    assert at_s(board) == 50.0
    board.note(p.NoticeGone("aws"))
    assert at_s(board) == 70.0


def test_a_clock_that_is_set_moves_no_end() -> None:
    """A new worker, or a new look, turns the same time of the world into another one of ours."""
    board = NoticeBoard()
    board.note(seen(at_unix_s=1000.0, at_s=100.0))
    for wrong_s in (-3600.0, 3600.0, 1e9):
        board.note(seen(at_unix_s=1000.5, at_s=100.0 + wrong_s))
        assert at_s(board) == 100.0


def test_an_end_that_is_moved_moves_by_the_difference_whatever_the_clock_says_now() -> None:
    board = NoticeBoard()
    board.note(seen(at_unix_s=1000.0, at_s=100.0))
    board.note(seen(at_unix_s=1600.0, at_s=5.0))
    assert at_s(board) == 700.0
    board.note(seen(at_unix_s=900.0, at_s=5.0))
    assert at_s(board) == 0.0


def test_each_change_is_said_once() -> None:
    board = NoticeBoard()
    assert board.take_news() == []
    for notice in (seen(), seen(), p.NoticeGone("slurm"), p.NoticeGone("slurm")):
        board.note(notice)
    first, second = board.take_news()
    assert first == f"slurm: {RunEnd('slurm', 'why', 100.0, 1000.0)}"
    assert second == first.replace("slurm:", "slurm: no longer so:")
    assert "the run ends at 1970-01-01" in first
    assert board.take_news() == []


def test_a_source_that_does_not_answer_is_named_in_a_warning_and_is_no_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board = NoticeBoard()
    board.note(seen("aws", at_s=50.0))
    board.note(p.NoticeUnanswered("aws", "PUT http://169.254.169.254: status 403"))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "aws does not answer (PUT http://169.254.169.254: status 403)" in record.getMessage()
    assert at_s(board) == 50.0


# ---- the last moment


class Now:
    """A clock that tests set."""

    s = 0.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def signals() -> Iterator[StopNotice]:
    listening = StopNotice(["SIGTERM", "SIGUSR1"])
    listening.install()
    yield listening
    listening.uninstall()


def last_moment(now: Now, signals: StopNotice, **settings: float) -> LastMoment:
    return LastMoment(signals, config=CFConfig(**settings), clock=now)  # type: ignore[arg-type]


def needs() -> Needs:
    return Needs(durable_s=10.0, gap_s=1.0)


def test_training_goes_on_until_the_last_moment(now: Now, signals: StopNotice) -> None:
    moment = last_moment(now, signals)
    assert moment.due(lambda: pytest.fail("nobody needs to know")) is None
    moment.board.note(seen(at_s=100.0))
    now.s = 88.9
    assert moment.due(needs) is None
    now.s = 89.0
    stop = moment.due(needs)
    assert stop is not None
    assert (stop.source, stop.ends_in_s) == ("slurm", 11.0)


def test_boundaries_measure_how_far_apart_they_are(now: Now, signals: StopNotice) -> None:
    moment = last_moment(now, signals)
    for now.s in (5.0, 7.0):
        moment.pass_boundary(is_epoch_end=False)
    known = moment.needs(state_bytes=0, started_s=(6.0,), upload_s=1.0, cached_s=None)
    # 5 s unmeasured, 4 s of them for the one in flight, 1 s of upload, 2 s of margin
    assert known == Needs(durable_s=5.0 + 4.0 + 1.0 + 2.0, gap_s=6.0)


@pytest.mark.parametrize(
    ("settings", "uploads_last", "upload_s", "more_s"),
    [
        ({}, True, 0.0, 0.0),
        ({"requeue": True}, True, 0.0, 3.0),
        ({"stop_before_s": 60.0}, True, 0.0, 60.0),
        ({}, False, 50.0, 0.0),
    ],
    ids=["nothing", "requeue", "the script's own end", "an upload that nobody waits for"],
)
def test_time_is_kept_free_for_what_comes_after_the_last_checkpoint(
    settings: dict[str, Any],
    uploads_last: bool,
    upload_s: float,
    more_s: float,
    now: Now,
    signals: StopNotice,
) -> None:
    config = CFConfig(**settings)
    moment = LastMoment(signals, config=config, uploads_last=uploads_last, clock=now)
    known = moment.needs(state_bytes=0, started_s=(), upload_s=upload_s, cached_s=None)
    assert known.durable_s == 5.0 + 2.0 + more_s


def test_grace_counts_from_the_first_sigterm(signals: StopNotice) -> None:
    signals._handle(signal.SIGUSR1, None)
    assert signals.terminated_s is None
    signals._handle(signal.SIGTERM, None)
    first_s = signals.terminated_s
    signals._handle(signal.SIGTERM, None)
    assert first_s is not None
    assert signals.terminated_s == first_s
    moment = LastMoment(signals, config=CFConfig(stop_grace_s=30.0), clock=lambda: first_s + 10.0)
    assert moment.grace_left_s() == 20.0
    stop = moment.due(needs)
    assert stop is not None
    assert (stop.source, stop.ends_in_s) == ("SIGTERM", 20.0)


@pytest.mark.parametrize(
    ("durable_s", "settings", "terminated", "left_s"),
    [
        (10.0, {}, False, 60.0),
        (100.0, {}, False, 100.0),
        (100.0, {"stop_before_s": 90.0}, False, 60.0),
        (10.0, {"stop_grace_s": 90.0}, False, 90.0),
        (10.0, {"stop_grace_s": 20.0}, True, 20.0),
    ],
)
def test_a_run_that_stops_waits_for_a_bounded_time(
    now: Now,
    signals: StopNotice,
    durable_s: float,
    settings: dict[str, float],
    terminated: bool,
    left_s: float,
) -> None:
    if terminated:  # then its grace counts, and no other
        signals._handle(signal.SIGTERM, None)
        now.s = signals.terminated_s or 0.0
    moment = last_moment(now, signals, **settings)
    moment.stopping(Stop("SIGUSR1", "why"), Needs(durable_s, gap_s=1.0))
    now.s += 5.0
    assert moment.left_s() == left_s - 5.0
    assert moment.upload_left_s() == math.inf


def test_closing_has_a_time_of_its_own_once_the_last_checkpoint_is_durable(
    now: Now, signals: StopNotice
) -> None:
    moment = last_moment(now, signals)
    moment.stopping(Stop("SIGUSR1", "why"), needs())
    now.s = 50.0  # until it was durable, and for what the script then did
    moment.closing(has_stopped=False)
    assert moment.left_s() == 10.0
    moment.closing(has_stopped=True)
    assert moment.left_s() == 60.0
    over = last_moment(now, signals)
    over.closing(has_stopped=False)
    assert over.left_s() is None
    signals._handle(signal.SIGTERM, None)
    now.s = signals.terminated_s or 0.0
    assert over.left_s() == 60.0


def test_an_upload_ends_before_a_known_end_and_what_comes_after_it(
    now: Now, signals: StopNotice
) -> None:
    moment = last_moment(now, signals, stop_before_s=30.0, requeue=True)
    moment.stopping(Stop("slurm", "why", ends_in_s=100.0), needs())
    now.s = 5.0
    assert moment.upload_left_s() == 100.0 - 5.0 - 30.0 - 3.0
