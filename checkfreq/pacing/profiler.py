"""Measures the costs of a run while it trains, and passes them to policy/tuner.py, which decides.

The manager reports every boundary, weight update and checkpoint. In CFMode.AUTO the interval
follows from the costs; otherwise they are only shown. Belongs to the training thread.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from checkfreq.config import ScalarWriter
from checkfreq.pacing.held_time import Held
from checkfreq.pacing.profile_cache import ProfileCache
from checkfreq.pacing.reporting import CostReport, Recorder
from checkfreq.pacing.timing import IterationTimer, Span
from checkfreq.pacing.trace import TraceLog
from checkfreq.persist.attempts import Attempt
from checkfreq.policy.failure_rate import LEAST_FAILURES, FailureRate
from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.profile import Profile
from checkfreq.policy.tuner import Iteration, Measured, RateTuner, Verdict
from checkfreq.types import Objective, SnapshotPlace

logger = logging.getLogger(__name__)

#: How often the measured costs are saved, for a run that is killed.
_SAVE_EVERY_S = 60.0


class _Ended(NamedTuple):
    """An iteration whose times are not known yet: a device's events come later."""

    held: Held
    is_regular: bool
    is_quiet: bool
    counts: bool


class Profiler:
    """The measured costs of one run.

    ``cache`` is given in CFMode.AUTO, on the rank that decides: plans are logged and kept there
    alone. ``interval_steps`` is the user's own interval in CFMode.MANUAL; 0: epochs only.
    ``trace`` records what the tuner is told, to be replayed.
    """

    def __init__(
        self,
        policy: FrequencyPolicy,
        *,
        dynamic: bool = True,
        interval_steps: int | None = None,
        summary_writer: ScalarWriter | None = None,
        cache: ProfileCache | None = None,
        trace: TraceLog | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tuner = RateTuner(policy, dynamic=dynamic)
        self._dynamic = dynamic
        self._seen = FailureRate().facts()
        self._trace = trace
        self._interval_steps = interval_steps
        self._report = CostReport(
            self.tuner, interval_steps=interval_steps, summary_writer=summary_writer
        )
        self._cache = cache
        self._key: Mapping[str, object] = {}
        self._clock = clock
        self._timer: IterationTimer | None = None
        self._ended: deque[_Ended] = deque()
        self._was_ready = False
        self._after_epoch = False
        self._is_disturbed = False
        self._cache_rejected: str | None = None
        self._began_s = clock()
        self._saved_s = clock()

    # ---- what happens

    @property
    def decides(self) -> bool:
        """Whether the interval follows the costs (CFMode.AUTO)."""
        return self._interval_steps is None

    @property
    def has_begun(self) -> bool:
        """True from the first boundary on."""
        return self._timer is not None

    def begin(
        self, *, step: int, timer: IterationTimer, num_slots: int, key: Mapping[str, object]
    ) -> None:
        """Start measuring at the first boundary, when state, slots and device are known.

        ``step`` is the newest step that has a checkpoint; intervals are counted from it. A profile
        cached under the same ``key`` gives a plan at once.
        """
        self._key = key
        cached = None
        if self._cache is not None:
            self._cache.opened()
            cached = self._cache.load(key)
        policy = replace(self.tuner.policy, num_slots=max(1, num_slots))
        if policy.objective is Objective.GOODPUT and policy.mtbf_s is None:
            policy = replace(policy, mtbf_s=self.failures.mtbf_s)
        self._seen = self.failures.facts()
        self._say_failures(policy)
        self.tuner.begin(policy, cached=cached)
        self.tuner.continue_from(step)
        self._begin_trace(policy, from_step=step, cached=cached)
        self._timer = timer
        timer.mark_boundary()

    @property
    def failures(self) -> FailureRate:
        """How often runs in this directory have failed; known in CFMode.AUTO, on rank 0."""
        return FailureRate() if self._cache is None else self._cache.failures()

    def asked_to_end(self) -> None:
        """Somebody asked for the end of this run: it is no failure, however it ends."""
        if self._cache is not None and self._timer is not None:
            self._cache.closed()

    def _say_failures(self, policy: FrequencyPolicy) -> None:
        failures = self.failures
        if not failures.failures:
            return
        use = ""
        if self.tuner.policy.mtbf_s is None and policy.objective is Objective.GOODPUT:
            use = f"; not planned with before {LEAST_FAILURES} failures"
            use = use if policy.mtbf_s is None else "; planned with, since no mtbf_s was given"
        logger.info("runs in this directory have failed %s%s", failures.explain(), use)

    def _begin_trace(
        self, policy: FrequencyPolicy, *, from_step: int, cached: Profile | None
    ) -> None:
        if self._trace is None:
            return
        self._trace.begin(
            from_step=from_step,
            max_overhead=policy.max_overhead,
            mtbf_s=policy.mtbf_s,
            objective=policy.objective.value,
            num_slots=policy.num_slots,
            dynamic=self._dynamic,
            interval_steps=self._interval_steps,
            cached=None if cached is None else cached.to_dict(),
        )

    def boundary(
        self,
        *,
        is_epoch: bool,
        held: Held,
        is_quiet: bool,
        is_ready: bool,
    ) -> None:
        """An iteration ended, after everything that ended in it was reported.

        ``held`` is what held training during it. ``is_quiet``: the worker has nothing to do.
        ``is_ready``: snapshots can be taken; until then, slots are being prepared and iterations
        are slower than they will be.
        """
        if self._timer is None:
            return
        self._timer.mark_boundary()
        is_regular = not (is_epoch or self._after_epoch or self._is_disturbed)
        self._ended.append(_Ended(held, is_regular, is_quiet, self._was_ready))
        self._was_ready = is_ready
        self._after_epoch, self._is_disturbed = is_epoch, False
        for span in self._timer.finished():
            self._observe(span, self._ended.popleft())

    def update(self) -> None:
        """The weights are about to change."""
        if self._timer is not None:
            self._timer.mark_update()

    def disturb(self) -> None:
        """This iteration contains something unusual: its time is not compared with others."""
        self._is_disturbed = True

    def started(self, attempt: Attempt) -> None:
        """A snapshot was begun."""
        if self._trace is not None:
            plan = self.tuner.plan
            self._trace.started(
                attempt.id,
                step=attempt.step,
                start_s=attempt.started_s,
                reason=attempt.reason,
                planned=plan.interval_steps if plan is not None else None,
            )
        self.tuner.started(
            attempt.id,
            step=attempt.step,
            start_s=attempt.started_s,
            is_periodic=attempt.reason == "periodic",
        )

    def ended(self, attempt: Attempt, *, free_device_bytes: int | None) -> None:
        """A checkpoint became durable or failed.

        ``free_device_bytes``: memory that a snapshot on the device may use; None: none is taken.
        """
        self.tuner.free_device_bytes = free_device_bytes
        measured = _measured(attempt)
        # The worker's instant if there is one: this process learns of the end at a later boundary.
        end_s = (attempt.durable_s if measured is not None else attempt.ended_s) or self._clock()
        self.tuner.ended(attempt.id, end_s=end_s, measured=measured)
        if self._trace is not None:
            self._trace.ended(attempt.id, end_s=end_s, stall_s=attempt.stall_s, measured=measured)
        if measured is not None:
            self._report.write_scalars(attempt)
        if self._clock() - self._saved_s > _SAVE_EVERY_S:
            self._save()

    def uploading(self, began_s: float, ended_s: float | None) -> None:
        """An upload to the mirror began, or has ended: what it adds to iterations is charged."""
        self.tuner.uploading(began_s, ended_s)
        if self._trace is not None:
            self._trace.uploading(began_s, ended_s)

    def close(self, *, clean: bool) -> None:
        """Save the measured costs for the next run."""
        if self._timer is not None:
            self._save()
            if self._trace is not None:
                self._trace.write()
            if self._cache is not None and clean:  # otherwise the next run counts a failure
                self._cache.closed()
            self._timer = None

    def _save(self) -> None:
        self._saved_s = self._clock()
        if self._cache is None:
            return
        self._cache.note_running(self._saved_s - self._began_s)
        profile = self.tuner.profile()
        if profile is not None and self.tuner.is_measured:  # never store cached costs as measured
            self._cache.store(self._key, profile)

    def _observe(self, span: Span, ended: _Ended) -> None:
        if not ended.counts and self._trace is None:
            return
        overlap_s = None if span.update_s is None else span.update_s - span.start_s
        iteration = Iteration(
            span.start_s,
            span.end_s,
            ended.held.stall_s,
            overlap_s,
            ended.is_regular,
            ended.is_quiet,
            ended.held.waited_s,
            ended.held.met_s,
        )
        if self._trace is not None:
            self._trace.add(iteration, counts=ended.counts)
        if ended.counts:
            self.tuner.iteration(iteration)

    # ---- decisions

    def due(self, *, step: int) -> Verdict:
        """Whether a periodic checkpoint should start now."""
        return self.tuner.due(step=step, now_s=self._clock())

    def next_due_step(self, step: int) -> int:
        """The first boundary after ``step`` at which a checkpoint may be due, as planned now."""
        if self._interval_steps is None:
            return self.tuner.next_due_step(step)
        if self._interval_steps == 0:
            return sys.maxsize
        return (step // self._interval_steps + 1) * self._interval_steps

    def met(self, seconds: float) -> None:
        """The ranks met at a boundary, for so long."""
        self.tuner.met(seconds)
        if self._trace is not None:
            self._trace.paid(seconds)

    def next_meeting(
        self,
        step: int,
        *,
        is_late: bool,
        is_held_back: bool = False,
        iteration_s: float | None,
        every_s: float,
        since_last: int,
    ) -> int:
        """The boundary after ``step`` at which the ranks meet; the last was ``since_last`` ago.

        ``is_late``: a checkpoint is overdue and is taken as soon as possible.
        ``is_held_back``: none is taken for now, since storage fails.
        """
        if is_held_back:
            due_step = sys.maxsize
        else:
            due_step = step + 1 if is_late else self.next_due_step(step)
        steps = self.tuner.steps_to_meeting(
            due_steps=due_step - step,
            iteration_s=iteration_s,
            every_s=every_s,
            since_last=since_last,
        )
        if self._interval_steps and not is_held_back:  # never skip a step that the user asked for
            steps = min(steps, self.next_due_step(step) - step)
        return step + steps

    @property
    def iteration_s(self) -> float | None:
        """T; None before it is known."""
        return self.tuner.iteration_s

    def costs(self) -> dict[str, float]:
        """The costs of a checkpoint on this rank, for the other ranks."""
        profile = self.tuner.own_profile()
        return {} if profile is None else profile.shared_costs()

    def take_over(self, costs: Mapping[str, float]) -> None:
        """Plan with these costs of other ranks if they are higher."""
        self.tuner.set_cost_floor(costs)

    @property
    def place(self) -> SnapshotPlace:
        """Where the next snapshot should be taken."""
        return SnapshotPlace.HOST if self.tuner.plan is None else self.tuner.plan.place

    def report(self, recorder: Recorder, *, step: int) -> None:
        """Log a plan that is new or has changed, and discard a cached profile that was wrong."""
        if self._cache is None:
            return
        rejected = self.tuner.cache_rejected
        if rejected is not None and rejected != self._cache_rejected:
            self._cache_rejected = rejected
            self._cache.discard(rejected)
        self._report.plan(recorder, step=step)

    def stats(self) -> dict[str, Any]:
        """Costs as `measured`, and how often earlier runs failed (None: never, as far as known)."""
        return {**self.measured(), **self._seen}

    def measured(self) -> dict[str, Any]:
        """Costs in seconds as known now (None: not yet), and the plan they lead to."""
        return self._report.stats()


def _measured(attempt: Attempt) -> Measured | None:
    """Its times if it is durable, else None."""
    if attempt.durable_s is None or attempt.persist_s is None or attempt.copied_s is None:
        return None
    copy_s = attempt.copied_s - attempt.started_s if attempt.copy_s is None else attempt.copy_s
    return Measured(
        copy_s=max(0.0, copy_s),
        persist_s=max(0.0, attempt.persist_s),
        durable_s=max(0.0, attempt.durable_s - attempt.started_s),
        state_bytes=attempt.num_bytes or 0,
        device_copy_s=attempt.device_copy_s,
    )
