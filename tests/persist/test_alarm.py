"""What is logged, and passed to the hook, while checkpoints fail and when they work again."""

from __future__ import annotations

import logging

import pytest

from checkfreq.errors import PersistError
from checkfreq.events import FailureNotice
from checkfreq.persist.alarm import Alarm

ERROR = PersistError("step 40 was not checkpointed: no space", step=40, phase="begin")


class Run:
    """An alarm with clocks that the test sets, and the notices it sent."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.told: list[FailureNotice] = []
        self.alarm = Alarm(
            tolerate_failures=None,
            on_failure=self.told.append,
            clock=lambda: self.now_s,
            wall=lambda: 1e9 + self.now_s,
            current_step=lambda: 42,
        )


def test_a_failure_says_since_when_nothing_is_durable_and_what_a_kill_would_lose(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run()
    run.alarm.durable(30)
    run.now_s += 250.0
    run.alarm.failed(40, ERROR)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    for words in (
        "checkpoint of step 40 failed (1 in a row)",
        "No checkpoint newer than step 30 has become durable for 250 s (since 20",
        "A kill now would lose 12 iteration(s)",
        "the next try is at the next interval",
        "no space",
    ):
        assert words in record.message


def test_the_hook_hears_of_each_failure_and_of_their_end(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.alarm.succeeded(30)  # no failure before it, so nothing is sent
    run.alarm.durable(30)
    for _ in range(3):
        run.alarm.failed(40, ERROR)
    run.now_s += 60.0
    run.alarm.succeeded(42)
    run.alarm.durable(42)
    run.alarm.succeeded(43)
    assert [(n.num_in_row, n.retry_in_s, n.is_over) for n in run.told] == [
        (1, 0.0, False),
        (2, 1.0, False),
        (3, 2.0, False),
        (0, 0.0, True),
    ]
    assert run.told[0].error is ERROR
    assert {notice.durable_step for notice in run.told} == {30}
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warning == "checkpoints are durable again: step 42, after 3 failed in 60 s"


def test_what_the_hook_raises_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def call(notice: FailureNotice) -> None:
        raise OSError("the pager is down")

    alarm = Alarm(tolerate_failures=None, on_failure=call)
    alarm.failed(40, ERROR)
    alarm.succeeded(41)
    assert caplog.text.count("CFConfig.on_failure raised; training goes on") == 2
    assert "the pager is down" in caplog.text
