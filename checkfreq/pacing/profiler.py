"""Measures a run while it trains, and has the tuner decide: the clock side of policy/tuner.py.

Every boundary, weight update and checkpoint of the manager is reported here; what the run costs
comes out. In CFMode.AUTO the interval follows; otherwise it is only known. Belongs to the
training thread.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from checkfreq.config import ScalarWriter
from checkfreq.console import say
from checkfreq.pacing.held_time import Held
from checkfreq.pacing.profile_cache import ProfileCache
from checkfreq.pacing.timing import IterationTimer, Span
from checkfreq.persist.attempts import Attempt
from checkfreq.policy.frequency import FrequencyPolicy, Plan, Reason
from checkfreq.policy.profile import Profile
from checkfreq.policy.tuner import Due, Iteration, Measured, RateTuner
from checkfreq.types import Objective, SnapshotPlace

logger = logging.getLogger(__name__)

#: How often what was measured is put down, for a run that ends without a goodbye.
_SAVE_EVERY_S = 60.0


class Recorder(Protocol):
    """Who writes events down: the persistence."""

    def record(self, kind: str, step: int, **data: object) -> None:
        """Note an event."""
        ...


class _Ended(NamedTuple):
    """What is known of an iteration besides its times, which may come later."""

    held: Held
    is_regular: bool
    is_quiet: bool
    counts: bool


class Profiler:
    """What one run costs. Only with a ``cache``, of CFMode.AUTO, plans are said and kept.

    ``interval_steps`` is the user's (CFMode.MANUAL; 0: no periodic checkpoints).
    """

    def __init__(
        self,
        policy: FrequencyPolicy,
        *,
        dynamic: bool = True,
        interval_steps: int | None = None,
        summary_writer: ScalarWriter | None = None,
        cache: ProfileCache | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tuner = RateTuner(policy, dynamic=dynamic)
        self._dynamic = dynamic
        self._interval_steps = interval_steps
        self._writer = summary_writer
        self._cache = cache
        self._key: Mapping[str, object] = {}
        self._clock = clock
        self._timer: IterationTimer | None = None
        self._ended: deque[_Ended] = deque()
        self._was_ready = False
        self._after_epoch = False
        self._is_disturbed = False
        self._said: tuple[int, SnapshotPlace] | None = None
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
        """At the first boundary, when the state, its slots and its device are known.

        ``step`` is the newest one that has a checkpoint: intervals are counted from it. A
        profile that was cached under the same ``key`` gives the plan at once.
        """
        self._key = key
        cached = None
        if self._cache is not None:
            self._cache.opened()
            cached = self._cache.load(key)
        policy = replace(self.tuner.policy, num_slots=max(1, num_slots))
        if policy.objective is Objective.GOODPUT and policy.mtbf_s is None and self._cache:
            policy = replace(policy, mtbf_s=self._cache.estimated_mtbf_s())
        self.tuner = RateTuner(policy, dynamic=self._dynamic, cached=cached)
        self.tuner.continue_from(step)
        self._timer = timer
        timer.mark_boundary()

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
        """This iteration holds something that no other does: its time tells nothing."""
        self._is_disturbed = True

    def started(self, attempt: Attempt) -> None:
        """A snapshot was begun."""
        self.tuner.started(
            attempt.id,
            step=attempt.step,
            start_s=attempt.started_s,
            is_periodic=attempt.reason == "periodic",
        )

    def ended(self, attempt: Attempt, *, free_device_bytes: int | None) -> None:
        """A checkpoint became durable or failed.

        ``free_device_bytes``: what a device snapshot may use; None: there is to be none.
        """
        self.tuner.free_device_bytes = free_device_bytes
        measured = _measured(attempt)
        end_s = attempt.durable_s if measured is not None else attempt.ended_s
        self.tuner.ended(attempt.id, end_s=end_s or self._clock(), measured=measured)
        if measured is not None and self._writer is not None:
            self._write_scalars(self._writer, attempt)
        if self._clock() - self._saved_s > _SAVE_EVERY_S:
            self._save()

    def close(self, *, clean: bool) -> None:
        """Keep what was measured for the next run."""
        if self._timer is not None:
            self._save()
            if self._cache is not None and clean:
                self._cache.closed()
            self._timer = None

    def _save(self) -> None:
        self._saved_s = self._clock()
        if self._cache is None:
            return
        self._cache.note_running(self._saved_s - self._began_s)
        profile = self.tuner.profile()
        if profile is not None and self.tuner.is_measured:
            self._cache.store(self._key, profile)

    def _observe(self, span: Span, ended: _Ended) -> None:
        if not ended.counts:
            return
        overlap_s = None if span.update_s is None else span.update_s - span.start_s
        self.tuner.iteration(
            Iteration(
                span.start_s,
                span.end_s,
                ended.held.stall_s,
                overlap_s,
                ended.is_regular,
                ended.is_quiet,
                ended.held.waited_s,
                ended.held.met_s,
            )
        )

    # ---- what follows

    def due(self, *, step: int) -> Due:
        """Whether a periodic checkpoint should start now."""
        return self.tuner.due(step=step, now_s=self._clock())

    def next_due_step(self, step: int) -> int:
        """When, after boundary ``step``, a periodic checkpoint may be due, as planned now."""
        if self._interval_steps is None:
            return self.tuner.next_due_step(step)
        if self._interval_steps == 0:
            return sys.maxsize
        return (step // self._interval_steps + 1) * self._interval_steps

    def met(self, seconds: float) -> None:
        """The ranks met at a boundary, for so long."""
        self.tuner.met(seconds)

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

        ``is_late``: a checkpoint is due and is made up for as soon as it can be taken.
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
        if self._interval_steps and not is_held_back:  # the user's own steps are kept
            steps = min(steps, self.next_due_step(step) - step)
        return step + steps

    @property
    def iteration_s(self) -> float | None:
        """T, as far as it is known."""
        return self.tuner.iteration_s

    def costs(self) -> dict[str, float]:
        """What a checkpoint costs on this rank, for the others to know."""
        profile = self.tuner.own_profile()
        return {} if profile is None else profile.raisable()

    def take_over(self, costs: Mapping[str, float]) -> None:
        """Plan with these costs of other ranks where they are higher."""
        self.tuner.raise_costs(costs)

    @property
    def place(self) -> SnapshotPlace:
        """Where the next snapshot should be taken."""
        return SnapshotPlace.HOST if self.tuner.plan is None else self.tuner.plan.place

    def report(self, recorder: Recorder, *, step: int) -> None:
        """Say a plan that is new or has changed, once."""
        if self._cache is None:
            return
        rejected, plan = self.tuner.cache_rejected, self.tuner.plan
        if rejected is not None and rejected != self._cache_rejected:
            self._cache_rejected = rejected
            self._cache.discard(rejected)
        if plan is not None and self._said != (plan.interval_steps, plan.place):
            self._said = (plan.interval_steps, plan.place)
            self._say(plan, recorder, step=step)

    def _say(self, plan: Plan, recorder: Recorder, *, step: int) -> None:
        explanation = plan.explain(self.tuner.policy.max_overhead)
        say(logger, "checkpoints %s", explanation)
        recorder.record("plan", step, explanation=explanation, **self.stats())

    def stats(self) -> dict[str, Any]:
        """Costs in seconds as known now (None: not yet), and the plan they lead to."""
        tuner, profile = self.tuner, self.tuner.profile()
        plan = tuner.plan if self._interval_steps is None else self._given_plan(profile)
        steps = self._interval_steps
        return {
            **_costs(profile),
            "interval_steps": plan.interval_steps if plan is not None else steps,
            "reason": None if plan is None or steps is not None else plan.reason.value,
            "predicted_overhead": None if plan is None else plan.predicted_overhead,
            "expected_loss_s": None if plan is None else plan.expected_loss_s,
            "bytes_per_day": None if plan is None else plan.bytes_per_day,
            "mtbf_s": tuner.policy.mtbf_s,
            "measured_overhead": tuner.measured_overhead,
            "num_withheld": tuner.num_withheld,
            "num_bad_samples": tuner.num_bad_samples,
        }

    def _given_plan(self, profile: Profile | None) -> Plan | None:
        """What the user's interval leads to."""
        if profile is None or not self._interval_steps:
            return None
        return self.tuner.policy.plan_at(
            self._interval_steps, profile, reason=Reason.FLOOR, place=profile.place
        )

    def _write_scalars(self, writer: ScalarWriter, attempt: Attempt) -> None:
        values = {**self.stats(), "stall_s": attempt.stall_s, "num_bytes": attempt.num_bytes}
        try:
            for name, value in values.items():
                if isinstance(value, int | float):
                    writer.add_scalar(f"checkfreq/{name}", value, attempt.step)
        except Exception:  # a full disk under the user's writer must not end training
            logger.warning("CFConfig.summary_writer failed; it gets no more values", exc_info=True)
            self._writer = None


#: Names in ``stats()`` of what a profile holds.
_COSTS = (
    "iteration_s",
    "overlap_s",
    "host_copy_s",
    "device_copy_s",
    "persist_s",
    "durable_s",
    "cost_s",
    "cost_error_s",
    "cost_upper_s",
    "boundary_s",
)


def _costs(profile: Profile | None) -> dict[str, float | None]:
    return {name: None if profile is None else getattr(profile, name) for name in _COSTS}


def _measured(attempt: Attempt) -> Measured | None:
    """Its times, if it is durable."""
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
