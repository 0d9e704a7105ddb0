"""The time limit of a SLURM job: every form of squeue's answer, and squeues that give none."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from checkfreq.notices.command import run_command
from checkfreq.notices.slurm import SlurmEndTime, Told, time_left_s, told_by
from checkfreq.notices.source import NoAnswerError
from tests.notices.conftest import Install, SetClock, end_of

JOB = {"SLURM_JOB_ID": "42"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:57", 57.0),
        ("1:30:00", 5400.0),
        ("2-03:05:00", 183900.0),
        ("  4:05\n", 245.0),
        ("INVALID", 0.0),
        *(("UNLIMITED", math.inf), ("NOT_SET", math.inf)),
        *((text, None) for text in ("", "N/A", "57", "1:2:3:4", "-1:00", "1-2:03", "an error: 1")),
    ],
)
def test_every_form_of_the_time_left_is_read(text: str, seconds: float | None) -> None:
    assert time_left_s(text) == seconds


def test_the_shortest_component_of_a_job_counts_and_headlines_do_not() -> None:
    found = told_by("CLUSTER: one\n2:00   3   RUNNING\n1:30   3   COMPLETING   \n")
    assert found == Told(90.0, 3, "COMPLETING")
    assert told_by("UNLIMITED 0 RUNNING\n5:00 0 RUNNING\n") == Told(300.0, 0, "RUNNING")
    assert told_by("\n") is None


def test_the_end_is_what_squeue_says_of_this_job(command: Install, clock: SetClock) -> None:
    called = command("squeue", "echo 1:30:00")
    environ = {**JOB, "SLURM_JOB_END_TIME": f"{clock.unix_s + 100.0:.0f}"}  # which cannot change
    ends = end_of(SlurmEndTime(environ, clock=clock.clock()))
    assert (ends.source, ends.at_unix_s) == ("slurm", clock.unix_s + 5400.0)
    assert called.read_text() == "-h -t all -j 42 -O TimeLeft,RestartCnt,State\n"


@pytest.mark.parametrize(
    "script", ["exit 1", "true", "echo nonsense", "echo 1:00; exit 3"], ids=str
)
def test_without_an_answer_the_environment_counts(
    command: Install, clock: SetClock, script: str
) -> None:
    command("squeue", script)
    environ = {**JOB, "SLURM_JOB_END_TIME": "1000500"}
    ends = end_of(SlurmEndTime(environ, clock=clock.clock()))
    assert ends.at_unix_s == 1_000_500.0
    with pytest.raises(NoAnswerError):
        SlurmEndTime(JOB, clock=clock.clock()).poll()


def test_outside_a_job_nobody_is_asked_and_a_task_of_an_array_asks_for_itself(
    command: Install, clock: SetClock
) -> None:
    called = command("squeue", "echo 1:00")
    source = SlurmEndTime({}, clock=clock.clock())
    assert source.poll() is None
    assert source.pause_s == math.inf
    assert not called.exists()
    environ = {**JOB, "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "2"}
    SlurmEndTime(environ, clock=clock.clock()).poll()
    assert called.read_text() == "-h -t all -j 40_2 -O TimeLeft,RestartCnt,State\n"


def test_a_missing_squeue_is_named_and_soon_asked_for_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SetClock
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    source = SlurmEndTime(JOB, clock=clock.clock())
    pauses = []
    for _ in range(6):
        with pytest.raises(NoAnswerError, match="squeue: No such file"):
            source.poll()
        pauses.append(source.pause_s)
    assert pauses == [60.0] * 4 + [600.0] * 2


def test_a_limit_that_was_lifted_or_moved_is_followed_and_a_silent_controller_changes_nothing(
    command: Install, clock: SetClock
) -> None:
    source = SlurmEndTime(JOB, clock=clock.clock())
    command("squeue", "echo 1:00")
    first = source.poll()
    command("squeue", "exit 1")
    assert source.poll() == first
    command("squeue", "echo 2-00:00:00")
    moved = end_of(source)
    assert moved.at_unix_s == clock.unix_s + 172800.0
    command("squeue", "echo UNLIMITED")
    assert source.poll() is None


@pytest.mark.parametrize(
    ("restarts", "answer"),
    [("", "1:00:00 1 PENDING"), ("2", "1:00:00 3 RUNNING"), ("", "0:00 0 NODE_FAIL")],
)
def test_a_run_whose_job_has_a_newer_start_or_no_node_ends_soon_once(
    command: Install, clock: SetClock, restarts: str, answer: str
) -> None:
    source = SlurmEndTime({**JOB, "SLURM_RESTART_COUNT": restarts}, clock=clock.clock())
    command("squeue", f"echo {answer}")
    ends = end_of(source)
    assert ends.at_unix_s == clock.unix_s + 30.0
    assert ends.why == "SLURM has taken job 42 from this node"
    clock.pass_(15.0)
    assert source.poll() == ends
    newest = SlurmEndTime({**JOB, "SLURM_RESTART_COUNT": "2"}, clock=clock.clock())
    command("squeue", "echo 1:00:00 2 RUNNING")
    assert end_of(newest).at_unix_s == clock.unix_s + 3600.0


def test_squeue_is_asked_once_a_minute_and_more_often_near_the_end(
    command: Install, clock: SetClock
) -> None:
    source = SlurmEndTime(JOB, clock=clock.clock())
    assert source.pause_s == 60.0
    pauses = []
    for left in ("1:00:00", "10:00", "5:00", "0:30"):
        command("squeue", f"echo {left}")
        source.poll()
        pauses.append(source.pause_s)
    assert pauses == [60.0, 60.0, 30.0, 15.0]


def test_a_command_that_hangs_is_killed_with_its_children(command: Install) -> None:
    command("squeue", "sleep 1000 & sleep 1000")
    done = run_command(("squeue",), timeout_s=0.2)
    assert done.code is None
    assert done.error == "squeue did not answer within 0.2 s"
