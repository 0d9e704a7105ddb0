"""What is measured and what is not, on a clock that only the test moves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from checkfreq.pacing.held_time import HeldTime
from checkfreq.pacing.profile_cache import ProfileCache
from checkfreq.pacing.profiler import Profiler
from checkfreq.pacing.timing import HostTimer
from checkfreq.persist.attempts import Attempt, Marks
from checkfreq.policy.charges import AFTERMATH_ITERATIONS
from checkfreq.policy.failure_rate import FailureRate
from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.tuner import PROFILE_ITERATIONS, Verdict

ITERATION_S = 1.0


class Log:
    """Takes events."""

    def record(self, kind: str, step: int, **data: object) -> None: ...


class Board:
    """A scalar writer of ours."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[float, int]]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        self.scalars.setdefault(tag, []).append((scalar_value, global_step))


class Run:
    """A training loop on a clock that only this moves."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self.now_s = 1000.0
        self.step = 0
        self.held = HeldTime(clock=lambda: self.now_s)
        self.profiler = Profiler(
            FrequencyPolicy(max_overhead=0.1),
            cache=ProfileCache(path / "profile.json"),
            clock=lambda: self.now_s,
            **changes,
        )
        timer = HostTimer(clock=lambda: self.now_s)
        self.profiler.begin(step=0, timer=timer, num_slots=2, key={"state": "a"})

    def iterate(
        self, num: int = 1, *, seconds: float = ITERATION_S, is_epoch: bool = False, **ready: bool
    ) -> None:
        for _ in range(num):
            self.now_s += 0.8 * seconds
            self.profiler.update()
            self.now_s += 0.2 * seconds
            self.step += 1
            self.profiler.boundary(
                is_epoch=is_epoch,
                held=self.held.lap(on_device=False),
                is_quiet=True,
                is_ready=ready.get("is_ready", True),
            )
            self.profiler.report(Log(), step=self.step)

    def checkpoint(self) -> None:
        """One that is durable within the next iteration, which it holds for 0.2 s."""
        attempt = self.begin(reason="periodic")
        with self.held.boundary():
            self.now_s += 0.2
        self.finish(attempt)

    def begin(self, *, reason: str) -> Attempt:
        attempt = Attempt(self.step, None, reason, Marks(), self.now_s)  # type: ignore[arg-type]
        self.profiler.started(attempt)
        return attempt

    def finish(self, attempt: Attempt) -> None:
        attempt.copied_s = attempt.copied_s or self.now_s
        attempt.ended_s = self.now_s
        attempt.persist_s, attempt.durable_s, attempt.num_bytes = 0.5, self.now_s + 0.1, 4096
        self.profiler.ended(attempt, free_device_bytes=None)
        self.iterate(1 + AFTERMATH_ITERATIONS)

    def profiled(self) -> Run:
        """Up to the first checkpoint's end: there is a plan."""
        self.iterate(3 + PROFILE_ITERATIONS)
        assert self.profiler.due(step=self.step) is Verdict.TAKE
        self.checkpoint()
        return self


def test_costs_are_what_the_clock_said(tmp_path: Path) -> None:
    stats = Run(tmp_path).profiled().profiler.stats()
    assert stats["iteration_s"] == pytest.approx(ITERATION_S)
    assert stats["overlap_s"] == pytest.approx(0.8 * ITERATION_S)
    assert stats["cost_s"] == pytest.approx(0.2)
    assert stats["host_copy_s"] == pytest.approx(0.2)
    assert stats["persist_s"] == 0.5
    assert stats["durable_s"] == pytest.approx(0.3)
    assert stats["interval_steps"] == 2
    assert stats["predicted_overhead"] == pytest.approx(0.1)


def test_iterations_are_not_measured_while_slots_are_prepared(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.iterate(50, seconds=3.0, is_ready=False)
    assert run.profiler.due(step=run.step) is Verdict.NOT_YET
    run.iterate()  # its start was not ready yet
    run.profiled()
    assert run.profiler.stats()["iteration_s"] == pytest.approx(ITERATION_S)


def test_an_epochs_first_and_last_iterations_are_not_measured(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(4):
        run.iterate(seconds=1.5)
        run.iterate(4)
        run.iterate(seconds=2.5, is_epoch=True)
    run.profiled()
    assert run.profiler.stats()["iteration_s"] == pytest.approx(ITERATION_S)


def test_waits_of_the_user_are_never_a_cost(tmp_path: Path) -> None:
    run = Run(tmp_path).profiled()
    for _ in range(20):
        run.iterate(5)
        attempt = run.begin(reason="requested")
        run.profiler.disturb()  # save(wait=True)
        with run.held.waiting():
            run.now_s += 30.0
        run.finish(attempt)
    assert run.profiler.stats()["cost_s"] == pytest.approx(0.2)
    assert run.profiler.tuner.overhead_s <= 21 * 0.2 + 1e-6
    assert run.profiler.stats()["interval_steps"] == 2


def test_the_boundarys_own_time_is_counted_and_is_no_part_of_an_iteration(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(3 + PROFILE_ITERATIONS):
        run.held.fence(0.01)
        run.iterate()
    run.checkpoint()
    stats = run.profiler.stats()
    assert stats["boundary_s"] == pytest.approx(0.01)
    assert stats["iteration_s"] == pytest.approx(ITERATION_S - 0.01)


def test_a_summary_writer_that_fails_is_given_up_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
            raise OSError("no space left on device")

    run = Run(tmp_path, summary_writer=Full()).profiled()
    run.iterate(5)
    run.checkpoint()
    assert caplog.text.count("summary_writer failed; it gets no more values") == 1


def test_the_devices_clock_wins_over_the_hosts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.iterate(3 + PROFILE_ITERATIONS)
    attempt = run.begin(reason="periodic")
    attempt.copied_s, attempt.copy_s, attempt.device_copy_s = run.now_s + 9.0, 0.25, 0.01
    run.finish(attempt)
    stats = run.profiler.stats()
    assert (stats["host_copy_s"], stats["device_copy_s"]) == (0.25, 0.01)


def test_a_cached_profile_that_is_off_is_discarded_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path).profiled().profiler.close(clean=True)
    later = Run(tmp_path)
    with caplog.at_level(logging.INFO, logger="checkfreq"):
        later.iterate(3 + PROFILE_ITERATIONS, seconds=2.0)
    assert "iteration_s is 2 here and 1 in the cached profile" in caplog.text
    assert later.profiler.stats()["interval_steps"] is None
    assert later.profiler.due(step=later.step) is Verdict.TAKE


def test_costs_taken_over_from_a_cache_are_not_stored_as_this_runs_own(tmp_path: Path) -> None:
    Run(tmp_path).profiled().profiler.close(clean=True)
    before = (tmp_path / "profile.json").read_text()
    short = Run(tmp_path)
    short.iterate(2)
    short.profiler.close(clean=True)
    profile = '"profile": '
    after = (tmp_path / "profile.json").read_text()
    assert after.partition(profile)[2] == before.partition(profile)[2]


def test_runs_that_fail_within_a_minute_say_nothing_about_failures(tmp_path: Path) -> None:
    for _ in range(9):
        Run(tmp_path).profiled().profiler.close(clean=False)
    assert ProfileCache(tmp_path / "profile.json").failures() == FailureRate()


def test_scalars_are_written_at_each_checkpoint(tmp_path: Path) -> None:
    board = Board()
    run = Run(tmp_path, summary_writer=board)
    run.profiled()
    run.iterate(5)
    run.checkpoint()
    assert [step for _, step in board.scalars["checkfreq/stall_s"]] == [13, 21]
    assert board.scalars["checkfreq/cost_s"] == [(pytest.approx(0.2), 21)]
    assert not any("reason" in tag or "place" in tag for tag in board.scalars)


def meeting_after(run: Run, *, is_late: bool = False, since_last: int = 1000) -> int:
    return run.profiler.next_meeting(
        run.step, is_late=is_late, iteration_s=0.01, every_s=1.0, since_last=since_last
    )


def test_ranks_meet_at_the_steps_that_the_user_chose_whatever_it_costs(tmp_path: Path) -> None:
    run = Run(tmp_path, interval_steps=7)
    run.profiler.met(0.1)  # would have them 400 steps apart
    assert meeting_after(run) == 7
    assert meeting_after(run, is_late=True) == 7


def test_a_late_checkpoint_of_the_users_own_interval_is_made_up_for_within_the_bound(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, interval_steps=1000)
    assert meeting_after(run, is_late=True) == 1
    run.profiler.met(0.01)  # a quarter of a tenth of the time: 0.4 s
    assert meeting_after(run, is_late=True) == 40


def test_a_meeting_is_no_part_of_an_iteration_and_is_charged_to_the_bound(tmp_path: Path) -> None:
    run = Run(tmp_path).profiled()
    stats, spent_s = run.profiler.stats(), run.profiler.tuner.overhead_s
    balance_s = run.profiler.tuner.balance_s
    run.now_s += 0.05
    run.held.met(0.05)
    run.profiler.met(0.05)
    assert run.profiler.tuner.overhead_s == pytest.approx(spent_s + 0.05)
    run.iterate(1)
    assert run.profiler.tuner.balance_s < balance_s
    run.iterate(20)
    assert run.profiler.stats()["iteration_s"] == pytest.approx(stats["iteration_s"])
    assert run.profiler.stats()["boundary_s"] == stats["boundary_s"]
