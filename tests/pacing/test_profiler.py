"""What is measured, what is not, and what is logged, on a clock that only the test moves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from checkfreq.pacing.held_time import Held, HeldTime
from checkfreq.pacing.profile_cache import ProfileCache
from checkfreq.pacing.profiler import Profiler
from checkfreq.pacing.timing import HostTimer
from checkfreq.persist.attempts import Attempt, Marks
from checkfreq.policy.charges import AFTERMATH_ITERATIONS
from checkfreq.policy.failure_rate import FailureRate
from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.tuner import PROFILE_ITERATIONS, Verdict
from checkfreq.types import Objective, SnapshotPlace

ITERATION_S = 1.0
KEY = {"state": "a"}


class Log:
    """Takes events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, dict[str, Any]]] = []

    def record(self, kind: str, step: int, **data: object) -> None:
        self.events.append((kind, step, data))


class Board:
    """A scalar writer of ours: the real one is driven in tests/contract/test_auto.py."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[float, int]]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        self.scalars.setdefault(tag, []).append((scalar_value, global_step))


class Run:
    """A training loop on a clock that only this moves."""

    def __init__(self, path: Path, *, cached: bool = True, key: Any = KEY, **changes: Any) -> None:
        self.now_s = 1000.0
        self.step = 0
        self.held = HeldTime(clock=lambda: self.now_s)
        self.log = Log()
        settings: dict[str, Any] = {
            "max_overhead": 0.1,
            "mtbf_s": None,
            "objective": Objective.BOUND,
        }
        policy = {name: changes.pop(name, value) for name, value in settings.items()}
        self.profiler = Profiler(
            FrequencyPolicy(**policy),
            cache=ProfileCache(path / "profile.json") if cached else None,
            clock=lambda: self.now_s,
            **changes,
        )
        self.profiler.begin(step=0, timer=HostTimer(clock=lambda: self.now_s), num_slots=2, key=key)

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
            self.profiler.report(self.log, step=self.step)

    def checkpoint(
        self, *, cost_s: float = 0.2, reason: str = "periodic", durable: bool = True
    ) -> Attempt:
        """One that is durable within the next iteration, which it holds for ``cost_s``."""
        attempt = self.begin(reason=reason)
        with self.held.boundary():
            self.now_s += cost_s
        return self.finish(attempt, durable=durable)

    def begin(self, *, reason: str) -> Attempt:
        attempt = Attempt(self.step, None, reason, Marks(), self.now_s)  # type: ignore[arg-type]
        self.profiler.started(attempt)
        return attempt

    def finish(self, attempt: Attempt, *, durable: bool = True) -> Attempt:
        attempt.copied_s = attempt.ended_s = self.now_s
        if durable:
            attempt.persist_s, attempt.durable_s, attempt.num_bytes = 0.5, self.now_s + 0.1, 4096
        self.profiler.ended(attempt, free_device_bytes=None)
        self.iterate(1 + AFTERMATH_ITERATIONS)
        return attempt

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


def test_figures_refer_to_the_users_own_interval(tmp_path: Path) -> None:
    run = Run(tmp_path, cached=False, interval_steps=25).profiled()
    stats = run.profiler.stats()
    assert (stats["interval_steps"], stats["reason"]) == (25, None)
    assert stats["predicted_overhead"] == pytest.approx(0.2 / 25)
    assert stats["expected_loss_s"] == pytest.approx(12.5 + 0.3)
    assert Run(tmp_path, cached=False, interval_steps=0).profiler.stats()["interval_steps"] == 0


def test_a_clock_that_goes_back_is_counted_and_nothing_else(tmp_path: Path) -> None:
    run = Run(tmp_path).profiled()
    before = run.profiler.stats()
    run.now_s -= 500.0
    run.step += 1
    run.profiler.boundary(
        is_epoch=False, held=run.held.lap(on_device=False), is_quiet=True, is_ready=True
    )
    assert run.profiler.stats() == {**before, "num_bad_samples": 1}


def test_the_devices_clock_wins_over_the_hosts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.iterate(3 + PROFILE_ITERATIONS)
    attempt = Attempt(run.step, None, "periodic", Marks(), run.now_s)  # type: ignore[arg-type]
    run.profiler.started(attempt)
    attempt.copied_s, attempt.copy_s, attempt.device_copy_s = run.now_s + 9.0, 0.25, 0.01
    attempt.persist_s, attempt.durable_s, attempt.num_bytes = 0.5, run.now_s + 0.1, 4096
    run.profiler.ended(attempt, free_device_bytes=None)
    run.iterate(1 + AFTERMATH_ITERATIONS)
    stats = run.profiler.stats()
    assert (stats["host_copy_s"], stats["device_copy_s"]) == (0.25, 0.01)


def test_a_copy_that_does_not_fit_the_overlap_goes_to_the_device_that_has_room(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.iterate(3 + PROFILE_ITERATIONS)
    for free, place in ((100, SnapshotPlace.HOST), (1 << 20, SnapshotPlace.DEVICE)):
        attempt = Attempt(run.step, None, "requested", Marks(), run.now_s)  # type: ignore[arg-type]
        run.profiler.started(attempt)
        attempt.copied_s, attempt.copy_s = run.now_s, 0.9
        attempt.persist_s, attempt.durable_s, attempt.num_bytes = 0.5, run.now_s + 0.1, 4096
        run.profiler.ended(attempt, free_device_bytes=free)
        run.iterate(2)
        assert run.profiler.place is place


def test_a_plan_is_logged_when_it_is_new_and_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    with caplog.at_level(logging.INFO, logger="checkfreq"):
        run.profiled()
        for _ in range(12):
            run.iterate(2)
            run.checkpoint()
        assert [kind for kind, *_ in run.log.events] == ["plan"]
        for _ in range(8):
            run.iterate(30)
            run.checkpoint(cost_s=2.0)
    plans = [data for kind, _, data in run.log.events if kind == "plan"]
    assert [plan["interval_steps"] for plan in plans] == sorted(p["interval_steps"] for p in plans)
    assert plans[-1]["interval_steps"] == 20
    assert [m for m in caplog.messages if m.startswith("checkpoints every")] == [
        f"checkpoints {plan['explanation']}" for plan in plans
    ]
    assert plans[0]["explanation"] == (
        "every 2 iterations: bound by the overhead budget, 10 % of 10 % used, expected loss 1.3 s "
        "per failure"
    )


def test_measured_costs_give_the_next_run_its_plan(tmp_path: Path) -> None:
    run = Run(tmp_path).profiled()
    run.profiler.close(clean=True)
    later = Run(tmp_path)
    later.profiler.report(later.log, step=0)
    assert later.profiler.stats()["interval_steps"] == 2
    assert [kind for kind, *_ in later.log.events] == ["plan"]


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


def test_goodput_keeps_the_bound_until_failures_are_known_then_weighs_them(tmp_path: Path) -> None:
    for _ in range(3):
        run = Run(tmp_path, objective=Objective.GOODPUT).profiled()
        assert run.profiler.stats()["mtbf_s"] is None
        assert run.profiler.stats()["reason"] == "budget"
        run.iterate(100)
        seconds = run.now_s - 1000.0
        run.profiler.close(clean=False)
    run = Run(tmp_path, objective=Objective.GOODPUT).profiled()
    assert run.profiler.stats()["mtbf_s"] == pytest.approx(seconds)
    assert run.profiler.stats()["reason"] == "failures"
    assert Run(tmp_path).profiled().profiler.stats()["mtbf_s"] is None  # the bound is the bound


def test_failures_are_shown_with_their_limits_and_how_they_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="checkfreq")
    for number in range(4):
        run = Run(tmp_path, objective=Objective.GOODPUT).profiled()
        assert run.profiler.stats()["failures_seen"] == (number or None)
        run.iterate(100)
        run.profiler.close(clean=False)
    stats = run.profiler.stats()
    assert stats["mtbf_seen_low_s"] < stats["mtbf_seen_s"] < stats["mtbf_seen_high_s"]
    assert stats["mtbf_s"] == stats["mtbf_seen_s"]
    once, twice, thrice = [line for line in caplog.messages if line.startswith("runs in this dir")]
    assert once.startswith("runs in this directory have failed once in 1.9 min of training: every")
    assert twice.endswith("; not planned with before 3 failures")
    assert thrice.endswith("; planned with, since no mtbf_s was given")
    caplog.clear()
    assert Run(tmp_path, mtbf_s=50.0).profiled().profiler.stats()["mtbf_s"] == 50.0
    (line,) = [line for line in caplog.messages if line.startswith("runs in this directory")]
    assert line.endswith(")")  # the confidence: nothing else is said


def test_a_run_whose_end_was_asked_for_has_not_failed(tmp_path: Path) -> None:
    run = Run(tmp_path).profiled()
    run.iterate(100)
    run.profiler.asked_to_end()  # and killed before anything else
    assert Run(tmp_path).profiler.failures == FailureRate(0, 0.0)


def test_scalars_are_written_at_each_checkpoint(tmp_path: Path) -> None:
    board = Board()
    run = Run(tmp_path, summary_writer=board)
    run.profiled()
    run.iterate(5)
    run.checkpoint()
    assert [step for _, step in board.scalars["checkfreq/stall_s"]] == [13, 21]
    assert board.scalars["checkfreq/cost_s"] == [(pytest.approx(0.2), 21)]
    assert not any("reason" in tag or "place" in tag for tag in board.scalars)


def test_reports_before_the_first_boundary_and_after_the_end_are_harmless(tmp_path: Path) -> None:
    profiler = Profiler(FrequencyPolicy(max_overhead=0.1))
    profiler.boundary(is_epoch=False, held=Held(), is_quiet=True, is_ready=True)
    profiler.update()
    profiler.close(clean=True)
    assert not profiler.has_begun
    assert profiler.stats()["interval_steps"] is None


def test_what_is_reported_before_the_first_boundary_is_not_lost() -> None:
    profiler = Profiler(FrequencyPolicy(max_overhead=0.1))
    tuner = profiler.tuner
    profiler.met(0.25)
    profiler.begin(step=0, timer=HostTimer(), num_slots=1, key=KEY)
    assert profiler.tuner is tuner
    assert tuner.overhead_s == 0.25
    assert tuner.policy.num_slots == 1


def meeting_after(run: Run, *, is_late: bool = False, since_last: int = 1000) -> int:
    return run.profiler.next_meeting(
        run.step, is_late=is_late, iteration_s=0.01, every_s=1.0, since_last=since_last
    )


def test_ranks_meet_at_the_steps_that_the_user_chose_whatever_it_costs(tmp_path: Path) -> None:
    run = Run(tmp_path, cached=False, interval_steps=7)
    run.profiler.met(0.1)  # would have them 400 steps apart
    assert meeting_after(run) == 7
    assert meeting_after(run, is_late=True) == 7


def test_a_late_checkpoint_of_the_users_own_interval_is_made_up_for_within_the_bound(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, cached=False, interval_steps=1000)
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
