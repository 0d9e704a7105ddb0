"""Keeps the overhead under its bound while training runs, in both directions. Pure.

Fed with iterations and checkpoints as they end, in seconds of any one clock. An iteration that
no checkpoint touched is *clean* and tells T. The others are charged: what they took longer than
T, held or slowed down, is the cost o of the checkpoints that touched them. A slowdown that is
not ours shows in clean iterations too, moves T, and is not charged. After every checkpoint the
plan is made anew; a token bucket (bucket.py) holds the bound whatever the plan says.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median

from checkfreq.policy.bucket import TokenBucket
from checkfreq.policy.estimates import OUTLIER, CheckpointCost, Estimate, IterationTime, Recent
from checkfreq.policy.frequency import FrequencyPolicy, Plan
from checkfreq.policy.profile import Profile, is_amount
from checkfreq.types import SnapshotPlace

#: Clean iterations before the first checkpoint, which is itself a measurement.
PROFILE_ITERATIONS = 10
#: Iterations at the start that tell nothing: allocators, autotuning, the loader's first batches.
_WARM_UP_ITERATIONS = 2
#: After so many iterations with none clean, a few without a checkpoint measure T again.
_STRETCH_AFTER = 64
_STRETCH_ITERATIONS = 4
#: Or as soon as touched iterations are shorter than T by this part.
_STALE = 0.1
#: The interval follows its costs once they differ by more than this part.
_HYSTERESIS = 0.1
#: A cached profile that is off by more than this factor is discarded.
_CACHE_OFF = {"iteration_s": 1.25, "cost_s": 2.0, "persist_s": 2.0}
#: If every iteration is an epoch's first or last, they are what there is to measure.
_IRREGULAR_IN_ROW = 8
_PARTIAL_IN_ROW = 5


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration, boundary to boundary.

    stall_s: of it, what a snapshot held training for. overlap_s: boundary to weight update.
    is_regular: False where something else is inside (validation, the loader's start).
    """

    start_s: float
    end_s: float
    stall_s: float = 0.0
    overlap_s: float | None = None
    is_regular: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of a checkpoint that became durable; ``device_copy_s`` only of a device snapshot."""

    copy_s: float
    persist_s: float
    durable_s: float
    state_bytes: int
    device_copy_s: float | None = None


class Due(Enum):
    """Whether a periodic checkpoint is to start at a boundary, and why not."""

    TAKE = "take"
    NOT_YET = "not yet"
    NO_BUDGET = "no budget"
    LATE = "the one before is not durable yet"
    MEASURING = "measuring the iteration time"


@dataclass(slots=True, eq=False)
class _Attempt:
    start_s: float
    reserved_s: float
    end_s: float = math.inf
    full_s: float = 0.0  # everything above T
    mild_s: float = 0.0  # what is above OUTLIER times T left out
    stall_s: float = 0.0
    whole_s: float = 0.0  # of the iterations it touched, its share
    is_partial: bool = False  # touched iterations whose own time is unknown
    measured: Measured | None = None

    def overlap_s(self, iteration: Iteration) -> float:
        return min(self.end_s, iteration.end_s) - max(self.start_s, iteration.start_s)


class RateTuner:
    """Decides at each boundary. ``dynamic=False`` keeps the first plan and has no bucket.

    ``cached`` is the profile of an earlier run: planned with at once, and checked against the
    first measurements.
    """

    def __init__(
        self,
        policy: FrequencyPolicy,
        *,
        dynamic: bool = True,
        cached: Profile | None = None,
    ) -> None:
        self.policy = policy
        self.plan: Plan | None = None
        self.free_device_bytes: int | None = None
        self.cache_rejected: str | None = None
        self.num_bad_samples = 0
        self.num_withheld = 0
        self.overhead_s = 0.0
        self.productive_s = 0.0
        self._dynamic = dynamic
        self._cached = cached
        self._bucket = TokenBucket(policy.max_overhead)
        self._time = IterationTime()
        self._cost = CheckpointCost()
        self._last_cost: Estimate | None = None
        self._full_costs: deque[float] = deque(maxlen=8)
        self._overlap, self._copy, self._device_copy = Recent(), Recent(), Recent()
        self._persist, self._durable = Recent(), Recent()
        self._stalls = Recent(window=8)
        self._window: deque[tuple[float, float]] = deque(maxlen=8)  # (cost, productive) each
        self._window_start_s = 0.0
        self._state_bytes = 0
        self._upper_s = 0.0
        self._attempts: dict[str, _Attempt] = {}
        self._last_step = 0
        self._num_seen = 0
        self._num_clean = 0
        self._num_accounted = 0
        self._num_uncredited = 0
        self._num_irregular = 0
        self._num_partial = 0
        self._since_clean = 0
        self._stretch_left = 0
        self._is_withheld = False
        if cached is not None:
            self._state_bytes = cached.state_bytes
            self.plan = policy.plan(cached)
            self._apply_plan(cached)

    # ---- what the user may want to know

    @property
    def measured_overhead(self) -> float | None:
        """Added time so far, a fraction of the time without checkpoints; None before any."""
        return self.overhead_s / self.productive_s if self.productive_s else None

    @property
    def is_measured(self) -> bool:
        """Whether this run has measured its own costs, rather than taken over cached ones."""
        return len(self._cost) > 0 and self._num_clean >= PROFILE_ITERATIONS

    @property
    def balance_s(self) -> float:
        """Seconds of overhead that may still be spent."""
        return self._bucket.balance_s

    def profile(self) -> Profile | None:
        """The costs as they are known now; None before the first checkpoint was measured."""
        known = self._cached
        iteration_s = known.iteration_s if known else None
        if self._num_clean >= PROFILE_ITERATIONS:
            iteration_s = self._time.value()
        cost = self._cost.value() or self._last_cost
        if cost is None and known is not None:
            cost = Estimate(known.cost_s, (known.cost_upper_s - known.cost_s) / 1.645)
        if iteration_s is None or cost is None:
            return None
        mean_s = max(cost.mean, self._stalls.value() or 0.0)
        return Profile(
            iteration_s=iteration_s,
            overlap_s=_or(self._overlap, known.overlap_s if known else 0.0),
            host_copy_s=_or(self._copy, known.host_copy_s if known else 0.0),
            device_copy_s=self._device_copy.value() or (known.device_copy_s if known else None),
            persist_s=_or(self._persist, known.persist_s if known else 0.0),
            durable_s=_or(self._durable, known.durable_s if known else 0.0),
            cost_s=mean_s,
            cost_upper_s=max(mean_s, cost.upper()),
            state_bytes=self._state_bytes,
            place=self.plan.place if self.plan else SnapshotPlace.HOST,
        )

    # ---- observations

    def iteration(self, iteration: Iteration) -> None:
        """An iteration ended. One whose times make no sense is counted and ignored."""
        duration_s = iteration.end_s - iteration.start_s
        if not (math.isfinite(duration_s) and duration_s > 0 and is_amount(iteration.stall_s)):
            self.num_bad_samples += 1
            return
        self._num_seen += 1
        is_regular = self._accept(iteration)
        touching = [a for a in self._attempts.values() if a.overlap_s(iteration) > 0]
        if touching:
            self._since_clean += 1
            self._charge(iteration, touching, is_regular=is_regular)
        elif is_regular:
            self._note_clean(iteration, duration_s)
        self._earn()
        if touching:
            self._settle(now_s=iteration.end_s)

    def started(self, attempt: str, *, step: int, start_s: float, is_periodic: bool) -> None:
        """A snapshot was begun at boundary ``step``; ``attempt`` is any name for it."""
        reserved_s = self._upper_s if is_periodic else 0.0
        self._bucket.spend(reserved_s)
        self._attempts[attempt] = _Attempt(start_s, reserved_s)
        self._last_step = step
        self._is_withheld = False

    def ended(self, attempt: str, *, end_s: float, measured: Measured | None) -> None:
        """A checkpoint became durable, or failed (``measured`` is None) at ``end_s``."""
        found = self._attempts.get(attempt)
        if found is None:
            return
        found.end_s = max(end_s, found.start_s)
        if measured is None:
            return
        if not all(
            is_amount(value) for value in (measured.copy_s, measured.persist_s, measured.durable_s)
        ):
            self.num_bad_samples += 1
            return
        found.measured = measured
        self._copy.add(measured.copy_s)
        self._persist.add(measured.persist_s)
        self._durable.add(measured.durable_s)
        if measured.device_copy_s is not None:
            self._device_copy.add(measured.device_copy_s)
        self._state_bytes = measured.state_bytes

    def continue_from(self, step: int) -> None:
        """``step`` was restored: intervals are counted from it."""
        self._last_step = step

    # ---- the decision

    def due(self, *, step: int, now_s: float) -> Due:
        """Whether a periodic checkpoint should start at boundary ``step``."""
        if self.plan is None:
            is_ready = self._num_clean >= PROFILE_ITERATIONS and not self._attempts
            may_retry = step - self._last_step >= PROFILE_ITERATIONS or not self._num_accounted
            return Due.TAKE if is_ready and may_retry else Due.NOT_YET
        if step - self._last_step < self.plan.interval_steps:
            return Due.NOT_YET
        if self._is_late(now_s):
            return Due.LATE
        if not self._dynamic:
            return Due.TAKE
        if self._must_measure():
            return Due.MEASURING
        return self._within_budget()

    def _within_budget(self) -> Due:
        is_first = not self._num_accounted and not self._attempts
        if is_first or self._bucket.balance_s >= self._upper_s:
            return Due.TAKE
        if not self._is_withheld:
            self._is_withheld = True
            self.num_withheld += 1
        return Due.NO_BUDGET

    def _is_late(self, now_s: float) -> bool:
        """Whether a snapshot taken now would have to wait for the one before."""
        active = [a for a in self._attempts.values() if a.end_s > now_s]
        if not active:
            return False
        if len(active) > 1 or self.policy.num_slots == 1:
            return True
        left_s = (self._durable.value() or math.inf) - (now_s - active[0].start_s)
        return left_s > (self._copy.value() or 0.0)

    def _must_measure(self) -> bool:
        """Without clean iterations T is a memory: insert a short stretch of them."""
        if not self._stretch_left and self._since_clean >= _STRETCH_AFTER:
            self._stretch_left = _STRETCH_ITERATIONS
        return self._stretch_left > 0

    # ---- iterations

    def _accept(self, iteration: Iteration) -> bool:
        if iteration.is_regular:
            self._num_irregular = 0
        else:
            self._num_irregular += 1
        is_regular = iteration.is_regular or self._num_irregular > _IRREGULAR_IN_ROW
        return is_regular and self._num_seen > _WARM_UP_ITERATIONS

    def _note_clean(self, iteration: Iteration, duration_s: float) -> None:
        self._time.add(duration_s)
        self._num_clean += 1
        self._since_clean = 0
        self._stretch_left = max(0, self._stretch_left - 1)
        if iteration.overlap_s is not None:
            self._overlap.add(iteration.overlap_s)
        if self._num_clean == PROFILE_ITERATIONS:
            self._check_cached("iteration_s", self._time.value())

    def _charge(self, iteration: Iteration, touching: list[_Attempt], *, is_regular: bool) -> None:
        """Share what the iteration took longer than T among the checkpoints that touched it."""
        iteration_s = self._iteration_s()
        full_s = mild_s = iteration.stall_s
        if is_regular and iteration_s is not None:
            full_s = iteration.end_s - iteration.start_s - iteration_s
            slowdown_s = full_s - iteration.stall_s
            mild_s += min(slowdown_s, (OUTLIER - 1) * iteration_s)
        whole_s = sum(attempt.overlap_s(iteration) for attempt in touching)
        for attempt in touching:
            share = attempt.overlap_s(iteration) / whole_s
            attempt.full_s += share * full_s
            attempt.mild_s += share * mild_s
            attempt.stall_s += share * iteration.stall_s
            attempt.whole_s += share * (iteration.end_s - iteration.start_s)
            attempt.is_partial |= not is_regular or iteration_s is None

    def _earn(self) -> None:
        iteration_s = self._iteration_s()
        self._num_uncredited += 1
        if iteration_s is not None:
            earned_s = self._num_uncredited * iteration_s
            self._num_uncredited = 0
            self.productive_s += earned_s
            self._bucket.earn(earned_s)

    def _iteration_s(self) -> float | None:
        own = self._time.value()
        return self._cached.iteration_s if own is None and self._cached else own

    # ---- checkpoints

    def _settle(self, *, now_s: float) -> None:
        """Account for the checkpoints whose last touched iteration has ended."""
        for name, attempt in list(self._attempts.items()):
            if attempt.end_s <= now_s:
                del self._attempts[name]
                self._account(attempt)

    def _account(self, attempt: _Attempt) -> None:
        cost_s = self._plausible(attempt)
        if is_stale := self._shows_stale_time(attempt):
            self._since_clean = _STRETCH_AFTER
        spent_s = cost_s
        if attempt.is_partial or is_stale:
            estimate = self._cost.value()
            spent_s = max(attempt.stall_s, cost_s, estimate.mean if estimate else 0.0)
        self._num_accounted += 1
        self._bucket.spend(spent_s - attempt.reserved_s)
        self.overhead_s += spent_s
        self._window.append((spent_s, self.productive_s - self._window_start_s))
        self._window_start_s = self.productive_s
        if attempt.measured is not None and not is_stale:
            self._learn(attempt, cost_s)

    def _shows_stale_time(self, attempt: _Attempt) -> bool:
        """Iterations with a checkpoint that are shorter than those without: T is out of date."""
        return attempt.full_s < -_STALE * attempt.whole_s

    def _plausible(self, attempt: _Attempt) -> float:
        """Its cost, without what is so far out of line that something else must be in it."""
        self._full_costs.append(attempt.full_s)
        typical_s = median(self._full_costs)
        is_usual = len(self._full_costs) > 2 and attempt.full_s <= OUTLIER * max(typical_s, 0.0)
        return attempt.full_s if is_usual else attempt.mild_s

    def _learn(self, attempt: _Attempt, cost_s: float) -> None:
        """A partial measurement counts only where whole ones are not to be had."""
        if attempt.is_partial and self._num_partial < _PARTIAL_IN_ROW:
            self._num_partial += 1
            return
        self._num_partial = 0
        self._cost.add(cost_s)
        self._stalls.add(attempt.stall_s)
        self._last_cost = self._cost.value()
        if self._last_cost is not None and len(self._cost) >= 2:
            self._check_cached("cost_s", self._last_cost.mean)
            self._check_cached("persist_s", self._persist.value())
        self._replan()

    def _check_cached(self, name: str, found: float | None) -> None:
        if self._cached is None or found is None:
            return
        expected, factor = getattr(self._cached, name), _CACHE_OFF[name]
        if not expected / factor <= found <= expected * factor:
            self.cache_rejected = (
                f"{name} is {found:.3g} here and {expected:.3g} in the cached profile"
            )
            self._cached = None
            if not len(self._cost):
                self.plan = None

    # ---- planning

    def _replan(self) -> None:
        profile = self.profile()
        if profile is None or (self.plan is not None and not self._dynamic):
            return
        new = self.policy.plan(profile, free_device_bytes=self.free_device_bytes)
        self.plan = self._with_hysteresis(new, profile)
        self._apply_plan(profile)

    def _with_hysteresis(self, new: Plan, profile: Profile) -> Plan:
        old = self.plan
        if old is None or new.interval_steps == old.interval_steps:
            return new
        if new.interval_steps > old.interval_steps:
            change = new.interval_steps > (1 + _HYSTERESIS) * old.interval_steps
            if change or self._is_over_bound():
                return new
        else:
            # What it would be if costs were a little higher: noise must not move it to and fro.
            careful = self.policy.plan(
                _scaled(profile, 1 + _HYSTERESIS / 2), free_device_bytes=self.free_device_bytes
            )
            if careful.interval_steps < old.interval_steps and (
                new.interval_steps < (1 - _HYSTERESIS) * old.interval_steps
            ):
                return self.policy.plan_at(
                    careful.interval_steps, profile, reason=new.reason, place=new.place
                )
        return self.policy.plan_at(old.interval_steps, profile, reason=new.reason, place=new.place)

    def _is_over_bound(self) -> bool:
        """Whether the last few checkpoints together cost more than was earned meanwhile."""
        cost_s = sum(cost for cost, _ in self._window)
        productive_s = sum(productive for _, productive in self._window)
        return cost_s > self._bucket.rate * productive_s

    def _apply_plan(self, profile: Profile) -> None:
        assert self.plan is not None
        if profile.place is not self.plan.place:
            self._cost.clear()  # they were another way's
            self._full_costs.clear()
        self._bucket.rate = self.policy.allowed_overhead(self.plan)
        self._upper_s = profile.cost_upper_s
        self._bucket.limit(4 * self._upper_s)


def _or(values: Recent, default: float) -> float:
    value = values.value()
    return default if value is None else value


def _scaled(profile: Profile, factor: float) -> Profile:
    return replace(
        profile,
        cost_s=profile.cost_s * factor,
        cost_upper_s=profile.cost_upper_s * factor,
        persist_s=profile.persist_s * factor,
        host_copy_s=profile.host_copy_s * factor,
    )
