"""Decides at each boundary whether to checkpoint, from the costs measured so far. Pure.

The tuner is told of iterations and checkpoints as they end, in seconds of one clock:

- An iteration that no checkpoint touched is *clean* and measures T (costs.py). The others are
  charged to the checkpoints that touched them (charges.py), as far as they took longer than the
  clean ones around them (neighbours.py): a slowdown with another cause shows in those too.
- After every checkpoint the interval is planned anew (frequency.py), longer or shorter, and small
  changes are damped (damping.py).
- A budget enforces the overhead bound whatever the plan says (budget.py). What noise explains of
  a cost does not hold checkpoints back at once (instalments.py).
- When iterations are no longer clean, T is measured again (baseline.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum

from checkfreq.policy.baseline import BaselineRefresh
from checkfreq.policy.budget import OverheadBudget
from checkfreq.policy.charges import Charge, Charges, Outliers
from checkfreq.policy.costs import FIRST_ITERATIONS, PROFILE_ITERATIONS, RunCosts
from checkfreq.policy.damping import HYSTERESIS, IntervalDamper
from checkfreq.policy.frequency import FrequencyPolicy, Plan, Reason
from checkfreq.policy.instalments import Instalments
from checkfreq.policy.meeting_schedule import MeetingSchedule
from checkfreq.policy.neighbours import AFTER, Neighbours
from checkfreq.policy.observations import Iteration, Measured
from checkfreq.policy.profile import Profile
from checkfreq.policy.situation import Situation, Situations
from checkfreq.policy.uploads import Uploads
from checkfreq.types import SnapshotPlace

__all__ = ["PROFILE_ITERATIONS", "Iteration", "Measured", "RateTuner", "Verdict"]

#: Iterations at the start that are not representative: allocators warm up, kernels are tuned, the
#: loader fetches its first batches.
_WARM_UP_ITERATIONS = 2
#: After so many irregular iterations in a row (epochs of one or two iterations), they count: there
#: are no others to measure.
_IRREGULAR_IN_ROW = 8
#: After so many partial measurements in a row, the next one counts: there are no complete ones.
_PARTIAL_IN_ROW = 5
#: The first checkpoint of a run whose costs are cached: there is none to fall back on.
_FIRST_STEPS = _WARM_UP_ITERATIONS + 1
#: One in so many intervals is a step longer; see _interval_steps.
_DITHER = 4
#: Longer intervals vary around their length by so large a part, through so many of it in turn:
#: neighbours are far from each other, the mean is the length, and their number is prime, so that
#: their sum is in step with few rhythms.
_SPREAD = 8
_PARTS = (3, 0, 5, 2, 6, 1, 4)
_LEAST_SPREAD_STEPS = 4
#: Of a cost whose neighbours tell next to nothing.
_LEAST_WEIGHT = 0.01


class Verdict(Enum):
    """Whether a periodic checkpoint should start at a boundary; if not, why."""

    TAKE = "take"
    NOT_YET = "not yet"
    NO_BUDGET = "no budget"
    LATE = "the previous checkpoint is not durable yet"
    MEASURING = "measuring the iteration time"


class RateTuner:
    """Chooses the interval and enforces the overhead bound.

    ``dynamic=False`` keeps the first plan and enforces nothing. ``cached`` is the profile of an
    earlier run: it gives a plan at once and is checked against the first measurements.
    ``free_device_bytes`` is the memory that a snapshot on the device may use, including what the
    last one used; None: snapshots cannot be taken there. ``paired=False`` compares checkpoints with
    the mean of all clean iterations instead of their neighbours, for benchmarks.interval.
    """

    def __init__(
        self,
        policy: FrequencyPolicy,
        *,
        dynamic: bool = True,
        cached: Profile | None = None,
        paired: bool = True,
    ) -> None:
        self.policy = policy
        self.plan: Plan | None = None
        self.free_device_bytes: int | None = None
        self.cache_rejected: str | None = None
        self.num_bad_samples = 0
        self.num_withheld = 0
        self._dynamic = dynamic
        self._costs = RunCosts(paired=paired)
        self._charges = Charges()
        self._neighbours = Neighbours() if paired else None
        self._instalments = Instalments()
        self._outliers = Outliers()
        self._uploads = Uploads()
        self._situations = Situations()
        self._budget = OverheadBudget(policy.max_overhead)
        self._refresh = BaselineRefresh(self._costs)
        self._damper = IntervalDamper()
        self._meetings = MeetingSchedule()
        self._cost_floor: Mapping[str, float] = {}
        self._place = SnapshotPlace.HOST
        self._is_final = False  # not dynamic, and the plan is made
        self._last_step = 0
        self._due_step: int | None = None  # None: to be found anew
        self._num_seen = 0
        self._num_settled = 0
        self._num_irregular = 0
        self._num_partial = 0
        self._is_withheld = False
        self._noise_s = 0.0  # of the newest cost
        self.begin(policy, cached=cached)

    def begin(self, policy: FrequencyPolicy, *, cached: Profile | None) -> None:
        """Take in what is known only at the first boundary, before anything is measured."""
        self.policy = policy
        if cached is not None:
            self._costs.start_from(cached)
            self._adopt(self._plan_cached(cached), cached)

    def continue_from(self, step: int) -> None:
        """Count intervals from ``step``, which was restored; 0 if there is no checkpoint yet."""
        self._last_step = step
        self._due_step = None

    # ---- the decision

    def due(self, *, step: int, now_s: float) -> Verdict:
        """Whether a periodic checkpoint should start at boundary ``step``."""
        if self.plan is None:
            return self._due_without_plan(step)
        if self._due_step is None:
            self._due_step = self._last_step + self._interval_steps(self.plan)
        if step < self._due_step:
            return Verdict.NOT_YET
        if self._is_late(now_s):
            return Verdict.LATE
        if not self._dynamic:
            return Verdict.TAKE
        if self._refresh.must_pause():  # asked only when one is due: otherwise it would pause early
            return Verdict.MEASURING
        return self._within_budget()

    def _due_without_plan(self, step: int) -> Verdict:
        """One as soon as there is a clean iteration; if it measured nothing, more within the bound.

        A run is unprotected until then, and the first checkpoint is paid for once.
        """
        # Another one must not begin before T is known well enough to compare the first with it.
        least = FIRST_ITERATIONS if self._num_settled else 1
        is_ready = self._costs.num_clean >= least and not self._refresh.is_pausing
        if len(self._charges) and step - self._last_step > PROFILE_ITERATIONS:
            return Verdict.LATE
        if not is_ready or len(self._charges):
            return Verdict.NOT_YET
        if not self._num_settled:
            return Verdict.TAKE
        may_retry = step - self._last_step >= PROFILE_ITERATIONS
        return Verdict.TAKE if may_retry and self._budget.balance_s >= 0 else Verdict.NOT_YET

    def _interval_steps(self, plan: Plan) -> int:
        """The interval of ``plan``, shortened at the start of a run and dithered later."""
        steps = plan.interval_steps
        if not self._last_step:  # a new run with a cached profile has no checkpoint to fall back on
            return min(steps, _FIRST_STEPS)
        # Iterations may alternate (two networks in turn, batches of two sizes). If the interval
        # were always the same, checkpoints could meet only the slow ones and be charged for it.
        if not self._dynamic or steps == 1 or plan.reason is not Reason.BUDGET:
            return steps
        if steps < _LEAST_SPREAD_STEPS:
            return steps + (self._num_settled % _DITHER == 0)
        most = max(1, steps // _SPREAD)
        part = _PARTS[self._num_settled % len(_PARTS)]
        return steps - most + int((part + 0.5) / len(_PARTS) * (2 * most + 1))

    def _is_late(self, now_s: float) -> bool:
        """Whether a snapshot taken now would have to wait for the previous one."""
        in_flight = self._charges.in_flight(now_s)
        if not in_flight:
            return False
        durable_s = self._costs.durable_s
        if len(in_flight) > 1 or self.policy.num_slots == 1 or durable_s is None:
            return True
        # With two slots the next copy may start while this persist is in progress, if the persist
        # ends before the copy does. One that is overdue (left_s < 0) may take any time.
        left_s = durable_s - (now_s - in_flight[0].start_s)
        return not 0 <= left_s <= self._costs.copy_s

    def _within_budget(self) -> Verdict:
        is_first = not self._num_settled and not len(self._charges)
        if is_first or self._budget.covers_checkpoint(self._charges.unreserved_s()):
            return Verdict.TAKE
        if not self._is_withheld:
            self._is_withheld = True
            self.num_withheld += 1
        return Verdict.NO_BUDGET

    # ---- iterations

    def iteration(self, iteration: Iteration) -> None:
        """An iteration ended. One with impossible times is counted and ignored."""
        if not iteration.is_sane():
            self.num_bad_samples += 1
            return
        iteration = iteration.consistent()
        self._num_seen += 1
        is_regular = self._is_comparable(iteration)
        if self._charges and self._charges.add(
            iteration, baseline=self._costs.baseline if is_regular else None
        ):
            self._refresh.add_touched()
        else:
            self._budget.pay_boundary(iteration.stall_s, iteration_s=self._costs.iteration_s)
            if is_regular and not self._is_slowed_by_upload(iteration):
                self._note_clean(iteration)
        self._budget.earn(self._costs.iteration_s)
        if not self._charges.is_empty:
            self._settle()

    def _settle(self) -> None:
        """Account for the checkpoints that are over.

        After earning: a checkpoint is judged by all the work since the last one. The first plan
        does not wait for what comes after.
        """
        for charge in self._charges.settle(after=AFTER if self.plan and self._neighbours else 0):
            self._account(charge)

    def _is_slowed_by_upload(self, iteration: Iteration) -> bool:
        """Whether an upload was in progress, so that the iteration says nothing about T.

        While T is unknown it does: a run must not wait for the end of an upload to begin.
        """
        if not self._uploads.meets(iteration):
            return False
        baseline = self._costs.baseline
        if baseline is None:
            return False
        self._uploads.add(iteration, baseline)
        self._budget.pay(self._uploads.settle())
        self._refresh.add_beside_upload()
        return True

    def uploading(self, began_s: float, ended_s: float | None) -> None:
        """An upload began, or the one that began then has ended."""
        self._uploads.note(began_s, ended_s)

    def _is_comparable(self, iteration: Iteration) -> bool:
        """Whether its time can be compared with T."""
        self._num_irregular = 0 if iteration.is_regular else self._num_irregular + 1
        is_regular = iteration.is_regular or self._num_irregular > _IRREGULAR_IN_ROW
        return is_regular and self._num_seen > _WARM_UP_ITERATIONS

    def _note_clean(self, iteration: Iteration) -> None:
        self._costs.add_clean(iteration)
        self._charges.add_clean()
        moved_s, limit_s = iteration.moved_s, self._costs.limit_s
        limited_s = moved_s if moved_s < limit_s else limit_s  # outliers count as that
        self._situations.add_clean(limited_s)
        if self._neighbours:
            self._neighbours.add(iteration.start_s, limited_s)
        self._outliers.add_clean(moved_s - limited_s)
        self._refresh.add_clean()  # last: it may bring T and the outliers' limit up to date
        if self._costs.num_clean in (FIRST_ITERATIONS, PROFILE_ITERATIONS):
            self._check_cached()
            if self.plan is None:
                self._replan()  # a checkpoint may have measured its cost already

    # ---- checkpoints

    def started(self, attempt: str, *, step: int, start_s: float, is_periodic: bool) -> None:
        """A snapshot was begun at boundary ``step``; ``attempt`` is its unique name."""
        if not math.isfinite(start_s):
            self.num_bad_samples += 1
            start_s = -math.inf  # so that it can still be settled
        if not self._num_settled and not len(self._charges):
            self._refresh.begin()
        reserved_s = self._budget.reserve() if is_periodic else 0.0
        self._charges.begin(attempt, start_s=start_s, reserved_s=reserved_s)
        self._last_step = step
        self._due_step = None
        self._is_withheld = False

    def ended(self, attempt: str, *, end_s: float, measured: Measured | None) -> None:
        """A checkpoint became durable, or failed (``measured`` is None) at ``end_s``.

        A checkpoint with impossible times is counted and treated as failed.
        """
        if not math.isfinite(end_s) or (measured is not None and not measured.is_sane()):
            self.num_bad_samples += 1
            measured = None
        if not math.isfinite(end_s):
            end_s = -math.inf  # so that it is over and defers no other
        if self._charges.end(attempt, end_s=end_s, measured=measured) and measured is not None:
            self._costs.add_durable(measured)

    def _account(self, charge: Charge) -> None:
        """Deduct the cost of a checkpoint from the budget and learn from it."""
        self._num_settled += 1
        self._due_step = None
        self._compare(charge)
        if charge.measured is None:
            self._account_failed(charge)
            return
        is_partial = charge.is_partial or not charge.num_touched
        is_wrong = self._refresh.is_contradicted_by(charge)
        cost_s = charge.cost_s
        if is_partial or is_wrong:  # the measured cost is too low: charge the usual one at least
            estimate = self._costs.cost
            cost_s = max(charge.stall_s, cost_s, estimate.mean if estimate else 0.0)
        cost_s += self._outliers.add(charge)
        usual = self._costs.cost
        if usual and charge.noise_s:
            cost_s = self._instalments.due_s(cost_s, usual_s=usual.mean, noise_s=charge.noise_s)
        self._budget.settle(cost_s, reserved_s=charge.reserved_s)
        self._damper.add_checkpoint(cost_s, productive_s=self.productive_s)
        if not is_wrong and not self._skips(charge, is_partial=is_partial):
            self._learn(charge)

    def _compare(self, charge: Charge) -> None:
        """Compare it with its neighbours instead of with T, and tell how far chance may move it."""
        level = self._neighbours.around(charge.start_s) if self._neighbours else None
        if level is None or not charge.num_touched:
            return
        charge.compare_with(level.mean_s)
        sum_s = self._costs.spread_s(charge.num_touched)
        charge.noise_s = level.noise_s(
            charge.num_touched, one_s=self._costs.spread_s(), sum_s=sum_s
        )
        weight = level.weight(charge.num_touched, noise_s=charge.noise_s, sum_s=sum_s)
        charge.weight = max(_LEAST_WEIGHT, weight)

    def _account_failed(self, charge: Charge) -> None:
        """Deduct the cost of a failed checkpoint, from which nothing is learned.

        It may have been in flight for very long, on a disk that hangs, and an error of T adds up
        over all those iterations. What may be such an error is not deducted, or there would be no
        checkpoints for as long again; the time for which training was held always is.
        """
        cost_s = charge.cost_s + self._outliers.add(charge)
        sure_s = max(min(cost_s, charge.stall_s), cost_s - self._costs.doubt_s(charge.num_touched))
        self._budget.settle(cost_s, reserved_s=charge.reserved_s, owed_s=sure_s)

    def _skips(self, charge: Charge, *, is_partial: bool) -> bool:
        """Whether nothing is learned from this checkpoint.

        A partial measurement counts only if there are no complete ones, and one that the user
        waited for only if there is no other.
        """
        if charge.has_waited and self._costs.cost is not None:
            return True
        if (is_partial or charge.has_waited) and self._num_partial < _PARTIAL_IN_ROW:
            self._num_partial += 1
            return True
        self._num_partial = 0
        return False

    def _learn(self, charge: Charge) -> None:
        self._situations.add_cost(charge.cost_s)
        self._noise_s = charge.noise_s
        self._costs.add_cost(
            charge.cost_s,
            stall_s=charge.stall_s,
            num_touched=charge.num_touched,
            weight=charge.weight,
        )
        self._check_cached()
        self._replan()

    def _check_cached(self) -> None:
        reason = self._costs.check_cached()
        if reason is not None:
            self.cache_rejected = reason
            self.plan = None

    # ---- planning

    def _plan_cached(self, cached: Profile) -> Plan:
        # Whether it still fits on the device is not known yet: assume what was true for that run.
        fitted = cached.state_bytes if cached.place is SnapshotPlace.DEVICE else None
        return self.policy.plan(cached, free_device_bytes=fitted)

    def _replan(self) -> None:
        profile = self.profile()
        if profile is None or (self._is_final and self.plan is not None):
            return
        new = self.policy.plan(profile, free_device_bytes=self.free_device_bytes)
        self._adopt(self._damped(new, profile), profile)

    def _damped(self, new: Plan, profile: Profile) -> Plan:
        if self.plan is None:
            return new
        factor = 1 + HYSTERESIS / 2
        steps = self._damper.steps(
            self.plan.interval_steps,
            new.interval_steps,
            bound=self._budget.rate,
            cautious=lambda: self.policy.plan(profile.with_costs_scaled(factor)).interval_steps,
        )
        return self.policy.plan_at(steps, profile, reason=new.reason, place=new.place)

    def _adopt(self, plan: Plan, profile: Profile) -> None:
        self._is_final = not self._dynamic and plan.place is self._place
        if plan.place is not self._place:  # a copy elsewhere costs something different
            self._costs.forget_costs()
            self._charges.forget_costs()
        self.plan = plan
        self._due_step = None
        self._place = plan.place
        self._budget.plan_for(profile.planned_cost_s, rate=self.policy.allowed_overhead(plan))

    # ---- many ranks

    def next_due_step(self, step: int) -> int:
        """The first boundary after ``step`` at which a checkpoint may be due, as planned now."""
        if self.plan is None:
            return step + 1
        planned = self._last_step + self._interval_steps(self.plan)
        if not self._dynamic:
            return max(step + 1, planned)
        planned = max(planned, step + self._refresh.num_left)
        left = self._budget.steps_to_checkpoint(
            self._charges.unreserved_s(),
            iteration_s=self._costs.iteration_s,
            boundary_s=self._costs.boundary_s,
        )
        # Look again half way: a checkpoint in flight may cost less than was set aside for it.
        return max(step + 1, planned, step + left // 2)

    def steps_to_meeting(
        self, *, due_steps: int, iteration_s: float | None, every_s: float, since_last: int
    ) -> int:
        """How many boundaries from now the ranks meet; see MeetingSchedule."""
        return self._meetings.steps(
            due_steps=due_steps,
            iteration_s=iteration_s,
            every_s=every_s,
            since_last=since_last,
            bound=self._budget.rate,
        )

    def met(self, seconds: float) -> None:
        """The ranks met at a boundary, which held training for so long."""
        self._budget.pay_meeting(self._meetings.met(seconds))

    def set_cost_floor(self, costs: Mapping[str, float]) -> None:
        """Plan with ``costs`` of other ranks (by their names in Profile) that are higher."""
        is_first = bool(costs) and not self._cost_floor
        self._cost_floor = costs
        if is_first and self._is_final:  # the only plan was made without them
            self._is_final = False
            self._replan()

    # ---- what is known

    @property
    def overhead_s(self) -> float:
        """Seconds that checkpoints, boundaries and meetings have added so far."""
        return self._budget.overhead_s

    @property
    def productive_s(self) -> float:
        """Seconds that the iterations so far would have taken without them."""
        return self._budget.productive_s

    @property
    def measured_overhead(self) -> float | None:
        """The fraction by which training has become longer so far; None while T is unknown."""
        return self.overhead_s / self.productive_s if self.productive_s else None

    @property
    def balance_s(self) -> float:
        """Seconds of overhead that may still be spent."""
        return self._budget.balance_s

    @property
    def is_measured(self) -> bool:
        """Whether this run has measured its own costs; otherwise they are cached or unknown."""
        return self._costs.is_measured

    @property
    def situation(self) -> Situation:
        """Whether iterations are slower, or checkpoints costlier, than they were before."""
        return self._situations.now(cost_error_s=self._noise_s)

    @property
    def iteration_s(self) -> float | None:
        """T; None before it was measured."""
        return self._costs.iteration_s

    def profile(self) -> Profile | None:
        """The costs that are planned with; None before the first checkpoint is measured."""
        own = self.own_profile()
        return own if own is None else own.at_least(self._cost_floor)

    def own_profile(self) -> Profile | None:
        """The costs of this rank alone."""
        return self._costs.profile(self._place)
