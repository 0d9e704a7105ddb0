"""Chooses the checkpoint interval from measured costs. Pure.

The largest of four terms decides (T, D, P, o: policy/profile.py)::

    budget     ceil(o / (p T - b))     keeps the overhead bound p; b is the cost of each boundary,
                                       o a careful estimate (Profile.planned_cost_s)
    storage    ceil(max(P, D) / T)     no snapshot waits for the one before; ceil((D + P) / T) with
                                       one slot
    failures   round(tau / T)          Daly's optimum, if a mean time between failures is given
    floor      1

CheckFreq (FAST'21) has the first two; SCR's overhead cap is the closest relative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import Profile
from checkfreq.policy.waste import daly_interval_s
from checkfreq.types import Objective, SnapshotPlace

_DAY_S = 86_400.0
#: A copy within the device is worth its memory if it saves more than this part of an iteration;
#: less cannot be told from noise.
_LEAST_SAVED = 0.002
#: And more than this part of the copy to the host, in both directions, so that noise does not move
#: snapshots back and forth.
_PLACE_HYSTERESIS = 0.1
#: More iterations than any run has; keeps quotients by tiny numbers finite.
_MOST_STEPS = 1e12


class Reason(Enum):
    """The term that decided."""

    BUDGET = "budget"
    STORAGE = "storage"
    FAILURES = "failures"
    FLOOR = "floor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A chosen interval and its consequences.

    interval_steps (k): iterations between checkpoint starts.
    predicted_overhead: added time, as a fraction of the time without checkpoints.
    boundary_overhead: the part of it that boundaries add, whatever the interval.
    expected_loss_s: work that a failure destroys on average: half an interval, and the time until
        a checkpoint is durable.
    bytes_per_day: written to storage.
    """

    interval_steps: int
    reason: Reason
    place: SnapshotPlace
    predicted_overhead: float
    expected_loss_s: float
    bytes_per_day: float
    boundary_overhead: float = 0.0

    def explain(self, max_overhead: float) -> str:
        """One line for people. The bound is left out where goodput exceeds it on purpose."""
        k = self.interval_steps
        every = "every iteration" if k == 1 else f"every {k} iterations"
        is_above = self.reason is not Reason.BUDGET and self.predicted_overhead > max_overhead
        used = "" if is_above else f" of {100 * max_overhead:.2g} %"
        used = f"{100 * self.predicted_overhead:.2g} %{used} used"
        if self.reason is Reason.BUDGET and self.boundary_overhead > max_overhead * BOUNDARY_SHARE:
            used += (
                f" ({100 * self.boundary_overhead:.2g} % by boundaries, which no interval changes: "
                "iterations are too short for this bound)"
            )
        return (
            f"{every}: {_WHY[self.reason]}, {used}, "
            f"expected loss {self.expected_loss_s:.2g} s per failure"
        )


#: The part of the bound that boundaries use up at most; the rest is for checkpoints.
BOUNDARY_SHARE = 0.5
_WHY = {
    Reason.BUDGET: "bound by the overhead budget",
    Reason.STORAGE: "bound by storage",
    Reason.FAILURES: "at the optimum for failures",
    Reason.FLOOR: "nothing in the way",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyPolicy:
    """Chooses the interval and where snapshots are taken. ``mtbf_s`` None: unknown."""

    max_overhead: float
    mtbf_s: float | None = None
    objective: Objective = Objective.BOUND
    num_slots: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.max_overhead < 1:
            raise ConfigError(
                f"max_overhead: expected a fraction between 0 and 1, got {self.max_overhead}"
            )
        if self.mtbf_s is not None and not (math.isfinite(self.mtbf_s) and self.mtbf_s > 0):
            raise ConfigError(f"mtbf_s: expected None or finite seconds > 0, got {self.mtbf_s}")
        if self.num_slots < 1:
            raise ConfigError(f"num_slots: expected at least 1, got {self.num_slots}")

    def plan(self, profile: Profile, *, free_device_bytes: int | None = None) -> Plan:
        """The smallest interval that every term allows, and the term that decided."""
        terms = {
            Reason.FLOOR: 1,
            Reason.STORAGE: self._storage_steps(profile),
            Reason.FAILURES: self._failure_steps(profile),
            Reason.BUDGET: self._budget_steps(profile),
        }
        reason = max(terms, key=lambda name: terms[name])  # the first of equal ones
        place = self.place(profile, free_device_bytes=free_device_bytes)
        return self.plan_at(terms[reason], profile, reason=reason, place=place)

    def plan_at(
        self, interval_steps: int, profile: Profile, *, reason: Reason, place: SnapshotPlace
    ) -> Plan:
        """The plan with a given interval, at these costs."""
        work_s = interval_steps * profile.iteration_s
        boundaries = profile.boundary_s / profile.iteration_s
        return Plan(
            interval_steps=interval_steps,
            reason=reason,
            place=place,
            predicted_overhead=profile.cost_s / work_s + boundaries,
            expected_loss_s=work_s / 2 + profile.durable_s,
            bytes_per_day=profile.state_bytes * _DAY_S / (work_s + profile.cost_s),
            boundary_overhead=boundaries,
        )

    def allowed_overhead(self, plan: Plan) -> float:
        """The bound to enforce: ``max_overhead``, unless goodput asks for more."""
        if self._is_for_goodput:
            # A quarter more than planned, so that noise does not make the budget withhold any.
            return max(self.max_overhead, 1.25 * plan.predicted_overhead)
        return self.max_overhead

    def place(self, profile: Profile, *, free_device_bytes: int | None) -> SnapshotPlace:
        """Where snapshots should be taken; a tie goes to the host.

        A copy to the host delays the weight update by as much as it outlasts the overlap window;
        a copy within the device delays it by its whole length. Until that has been measured it
        counts as 0, so that it is tried.
        """
        exposed_s = profile.host_copy_s - profile.overlap_s
        if free_device_bytes is None or free_device_bytes < profile.state_bytes:
            return SnapshotPlace.HOST
        saved_s = exposed_s - (profile.device_copy_s or 0.0)
        margin_s = max(_LEAST_SAVED * profile.iteration_s, _PLACE_HYSTERESIS * profile.host_copy_s)
        if profile.place is SnapshotPlace.DEVICE:
            margin_s = -margin_s
        worth_it = saved_s > margin_s
        return SnapshotPlace.DEVICE if worth_it else SnapshotPlace.HOST

    @property
    def _is_for_goodput(self) -> bool:
        """Goodput needs a failure rate; until one is known, the bound is kept."""
        return self.objective is Objective.GOODPUT and self.mtbf_s is not None

    def _budget_steps(self, profile: Profile) -> int:
        if self._is_for_goodput:
            return 1
        earned_s = self.max_overhead * profile.iteration_s
        return steps_for(
            profile.planned_cost_s, earned_s - boundary_share_s(profile.boundary_s, earned_s)
        )

    def _storage_steps(self, profile: Profile) -> int:
        busy_s = max(profile.persist_s, profile.host_copy_s)
        if self.num_slots == 1:
            busy_s = profile.persist_s + profile.host_copy_s
        return steps_for(busy_s, profile.iteration_s)

    def _failure_steps(self, profile: Profile) -> int:
        if self.mtbf_s is None:
            return 1
        tau_s = daly_interval_s(profile.cost_s, mtbf_s=self.mtbf_s)
        return max(1, round(_ratio(tau_s, profile.iteration_s)))


def boundary_share_s(boundary_s: float, earned_s: float) -> float:
    """The part of an iteration's earnings that its boundary uses up: at most half.

    Where iterations are so short that boundaries would use up everything, half is left for
    checkpoints: a run without any is worse than one that exceeds its bound.
    """
    most_s = BOUNDARY_SHARE * earned_s
    return boundary_s if boundary_s < most_s else most_s


def steps_for(amount_s: float, per_step_s: float) -> int:
    """How many steps cover an amount, ignoring rounding errors."""
    return max(1, math.ceil(_ratio(amount_s, per_step_s) * (1 - 1e-9)))


def _ratio(amount_s: float, per_step_s: float) -> float:
    """The quotient, at most ``_MOST_STEPS``."""
    return amount_s / per_step_s if amount_s < _MOST_STEPS * per_step_s else _MOST_STEPS
