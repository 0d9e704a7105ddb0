"""What users are shown of the costs: plans as they change, ``stats()``, scalars."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from checkfreq.config import ScalarWriter
from checkfreq.console import say
from checkfreq.persist.attempts import Attempt
from checkfreq.policy.frequency import Plan, Reason
from checkfreq.policy.profile import Profile
from checkfreq.policy.situation import Situation
from checkfreq.policy.tuner import RateTuner
from checkfreq.types import SnapshotPlace

logger = logging.getLogger(__name__)

#: What ``stats()`` shows of a profile, under the same names.
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


class Recorder(Protocol):
    """Writes events to ``events.jsonl``: the persistence."""

    def record(self, kind: str, step: int, **data: object) -> None:
        """Append an event."""
        ...


class CostReport:
    """Shows a tuner's costs. ``interval_steps`` is the user's own interval, or None."""

    def __init__(
        self, tuner: RateTuner, *, interval_steps: int | None, summary_writer: ScalarWriter | None
    ) -> None:
        self._tuner = tuner
        self._interval_steps = interval_steps
        self._writer = summary_writer
        self._reported: tuple[int, SnapshotPlace] | None = None

    def stats(self) -> dict[str, Any]:
        """Costs in seconds as known now (None: not yet), and the plan they lead to."""
        tuner, profile = self._tuner, self._tuner.profile()
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
            "situation": tuner.situation.value,
            "num_withheld": tuner.num_withheld,
            "num_bad_samples": tuner.num_bad_samples,
        }

    def _given_plan(self, profile: Profile | None) -> Plan | None:
        """The plan that the user's own interval amounts to."""
        if profile is None or not self._interval_steps:
            return None
        return self._tuner.policy.plan_at(
            self._interval_steps, profile, reason=Reason.FLOOR, place=profile.place
        )

    def plan(self, recorder: Recorder, *, step: int) -> None:
        """Log and record the tuner's plan where its interval or place is new."""
        plan = self._tuner.plan
        if plan is None or self._reported == (plan.interval_steps, plan.place):
            return
        self._reported = (plan.interval_steps, plan.place)
        explanation = plan.explain(self._tuner.policy.max_overhead)
        if self._tuner.situation is not Situation.USUAL:
            explanation += f"; {self._tuner.situation.value}"
        say(logger, "checkpoints %s", explanation)
        recorder.record("plan", step, explanation=explanation, **self.stats())

    def write_scalars(self, attempt: Attempt) -> None:
        """Pass the figures of a durable checkpoint to ``CFConfig.summary_writer``."""
        if self._writer is None:
            return
        values = {**self.stats(), "stall_s": attempt.stall_s, "num_bytes": attempt.num_bytes}
        try:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(f"checkfreq/{name}", value, attempt.step)
        except Exception:  # a full disk under the user's writer must not end training
            logger.warning("CFConfig.summary_writer failed; it gets no more values", exc_info=True)
            self._writer = None


def _costs(profile: Profile | None) -> dict[str, float | None]:
    return {name: None if profile is None else getattr(profile, name) for name in _COSTS}
