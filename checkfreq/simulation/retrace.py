"""Replays a policy over a recorded run: the same iterations, checkpoints where it would take them.

An iteration takes what it took in the trace (series.py), and besides what the checkpoints under way
add to it: each adds what one near by in the trace did, iteration by iteration. Nothing is random.
What the policy is told, and when, is what pacing/profiler.py tells it.

Not replayed: that ranks differ (what rank 0 saw counts), that ranks meet more often if there are
more checkpoints, and where on a device snapshots are taken. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.tuner import Iteration, Measured, RateTuner, Verdict
from checkfreq.simulation.deciders import Decider, FixedInterval, GivenSteps
from checkfreq.simulation.series import Cost, Series
from checkfreq.simulation.windows import WINDOW_ITERATIONS

#: Checkpoints whose costs those of the replay get in turn: the ones next to them in the trace.
_IN_TURN = 8


@dataclass(frozen=True, slots=True)
class Placed:
    """A checkpoint that the replay took: after how many iterations, planned how far apart."""

    at: int
    planned_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a policy would have done. Seconds; ``overhead`` and ``worst_overhead`` are fractions.

    overhead: added to the work since the first checkpoint was begun, by later ones (the bound does
    not cover the first), boundaries (their usual time) and meetings. overheads: the same up to
    each tenth of the run.
    worst_overhead: the largest in any `WINDOW_ITERATIONS`. expected_loss_s: the work that a failure
    would have destroyed, on average over all instants; longest_loss_s: at the worst one.
    num_late, num_withheld: checkpoints that were due and had to wait for another, or for budget.
    """

    placed: tuple[Placed, ...]
    planned_steps: int | None
    work_s: float
    added_s: float
    overhead: float
    overheads: tuple[float, ...]
    worst_overhead: float
    expected_loss_s: float
    longest_loss_s: float
    num_late: int
    num_withheld: int

    @property
    def interval_steps(self) -> float | None:
        """The median distance of checkpoints in the second half; None if there are not two."""
        ats = [each.at for each in self.placed]
        half = ats[len(ats) // 2 :] if len(ats) > 3 else ats
        gaps = [after - before for before, after in pairwise(half)]
        return float(median(gaps)) if gaps else None

    def planned_at(self, at: int) -> int | None:
        """The interval planned when the last checkpoint before iteration ``at`` was begun."""
        found = bisect_left([each.at for each in self.placed], at)
        return self.placed[found - 1].planned_steps if found else None


def as_recorded(series: Series) -> Replayed:
    """The run as it was: checkpoints where it took them, planned as they were then."""
    run = series.recording
    done = retrace(series, GivenSteps([run.from_step + 1 + cost.index for cost in series.costs]))
    planned = {cost.index: cost.planned_steps for cost in series.costs}
    given = run.interval_steps
    placed = tuple(Placed(each.at, given or planned.get(each.at)) for each in done.placed)
    last = placed[-1].planned_steps if placed else None
    return replace(done, placed=placed, planned_steps=last)


def policy_of(series: Series) -> FrequencyPolicy:
    """The policy of the run, with the settings that it had."""
    run = series.recording
    return FrequencyPolicy(
        max_overhead=run.max_overhead,
        mtbf_s=run.mtbf_s,
        objective=run.objective,
        num_slots=run.num_slots,
    )


def auto(series: Series, policy: FrequencyPolicy) -> Replayed:
    """CFMode.AUTO with ``policy``, starting from the cached profile that the run had, if any."""
    run = series.recording
    return retrace(series, RateTuner(policy, dynamic=run.dynamic, cached=run.cached))


def retrace(series: Series, decider: Decider) -> Replayed:
    """Replay ``decider``, which must be new."""
    replay = _Replay(series, decider)
    for at in range(len(series.work_s)):
        replay.iterate(at)
    return replay.result()


def ideal_interval(series: Series, *, max_overhead: float) -> int | None:
    """The smallest fixed interval that keeps the bound, or that storage can keep up with.

    Found by bisection, since overhead falls as the interval grows: one less would exceed the bound.
    None if not even one checkpoint after the first fits the run.
    """

    def keeps(steps: int) -> bool:
        return retrace(series, FixedInterval(steps)).overhead <= max_overhead

    most = len(series.work_s) // 2
    if most < 1 or not keeps(most):
        return None
    low, high = 0, 1  # the answer is in (low, high]
    while high < most and not keeps(high):
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    held_up = retrace(series, FixedInterval(high)).interval_steps
    return max(high, round(held_up or 0))


@dataclass(slots=True, eq=False)
class _Flight:
    """A checkpoint under way: what it still adds, and until when."""

    name: str
    cost: Cost
    start_s: float
    end_s: float
    work_s: float  # at its boundary, which a restore brings back
    age: int = 0
    is_first: bool = False

    def next(self) -> tuple[float, float]:
        """What it adds to the next iteration: by holding it, and by slowing it."""
        held, slowed, age = self.cost.held_s, self.cost.slowed_s, self.age
        self.age += 1
        return (
            held[age] if age < len(held) else 0.0,
            slowed[age] if age < len(slowed) else 0.0,
        )

    @property
    def is_spent(self) -> bool:
        return self.age >= max(len(self.cost.held_s), len(self.cost.slowed_s))


class _Replay:
    def __init__(self, series: Series, decider: Decider) -> None:
        run = series.recording
        self._series = series
        self._run = run
        self._decider = decider
        self._indices = [cost.index for cost in series.costs]
        self._uploads = _by_iteration(series)
        self._usual_s = median(series.boundary_s)
        self._now_s = 0.0
        self._work_s = 0.0
        self._added_s = 0.0
        self._first_s = 0.0  # of that, by the first checkpoint
        self._before = (0.0, 0.0)  # both, when that was begun
        self._busy_until_s = 0.0
        self._step = run.from_step + 1
        self._adding: list[_Flight] = []
        self._active: list[_Flight] = []
        self._restore_s = 0.0  # work in the newest durable checkpoint
        self._lost_s = self._longest_s = 0.0
        self._placed: list[Placed] = []
        self._overheads: list[float] = []
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW_ITERATIONS)
        self._worst = 0.0
        self._num_late = self._num_withheld = 0
        self._verdict: Verdict | None = None
        self._upload_s = 0.0
        decider.continue_from(run.from_step)

    def iterate(self, at: int) -> None:
        """Run iteration ``at`` of the trace, and decide after it."""
        run, start_s = self._run, self._now_s
        boundary_s = self._series.boundary_s[at]
        held_s, slowed_s, first_s = boundary_s, 0.0, 0.0
        for flight in self._adding:
            held, slowed = flight.next()
            held_s, slowed_s = held_s + held, slowed_s + slowed
            first_s += held + slowed if flight.is_first else 0.0
        work_s = self._series.work_s[at]
        waited_s, met_s = run.waited_s.get(at, 0.0), run.met_s.get(at, 0.0)
        held_s = max(0.0, held_s)
        moved_s = max(work_s / 2, work_s + slowed_s)  # chance must not turn time back
        self._now_s += held_s + moved_s + waited_s + met_s
        self._adding = [flight for flight in self._adding if not flight.is_spent]
        # What a boundary took longer than usual was the machine's doing.
        over_s = max(0.0, boundary_s - self._usual_s)
        added_s = held_s - over_s + moved_s - work_s + met_s
        self._count(at, work_s + over_s, added_s, first_s)
        self._finish()
        self._tell(at, start_s, held_s, waited_s, met_s)
        self._step += 1
        if at not in run.uncounted:
            self._decide(at)

    def result(self) -> Replayed:
        """After the last iteration."""
        plan = self._decider.plan
        return Replayed(
            placed=tuple(self._placed),
            planned_steps=None if plan is None else plan.interval_steps,
            work_s=self._work_s,
            added_s=self._added_s,
            overhead=self._overhead(),
            overheads=tuple(self._overheads),
            worst_overhead=self._worst,
            expected_loss_s=self._lost_s / self._now_s if self._now_s else 0.0,
            longest_loss_s=self._longest_s,
            num_late=self._num_late,
            num_withheld=self._num_withheld,
        )

    def _overhead(self) -> float:
        work_s, added_s = self._work_s - self._before[0], self._added_s - self._before[1]
        return (added_s - self._first_s) / work_s if work_s else 0.0

    def _count(self, at: int, work_s: float, added_s: float, first_s: float) -> None:
        before_s = self._work_s
        self._work_s += work_s
        self._added_s += added_s
        self._first_s += first_s
        self._window.append((work_s, added_s - first_s))
        if len(self._window) == WINDOW_ITERATIONS:
            work = math.fsum(each for each, _ in self._window)
            self._worst = max(
                self._worst, math.fsum(each for _, each in self._window) / (work or 1.0)
            )
        took_s = work_s + added_s
        self._lost_s += took_s * ((before_s + self._work_s) / 2 - self._restore_s)
        self._longest_s = max(self._longest_s, self._work_s - self._restore_s)
        num = len(self._series.work_s)
        if (at + 1) * 10 // num > at * 10 // num:
            self._overheads.append(self._overhead())

    def _finish(self) -> None:
        """Report the checkpoints that have become durable."""
        for flight in [each for each in self._active if each.end_s <= self._now_s]:
            self._active.remove(flight)
            self._restore_s = flight.work_s
            self._decider.ended(
                flight.name,
                end_s=flight.end_s,
                measured=Measured(
                    copy_s=flight.cost.copy_s,
                    persist_s=flight.cost.persist_s,
                    durable_s=flight.end_s - flight.start_s,
                    state_bytes=flight.cost.state_bytes,
                ),
            )

    def _tell(self, at: int, start_s: float, held_s: float, waited_s: float, met_s: float) -> None:
        run = self._run
        if (paid_s := run.paid_s.get(at)) is not None:
            self._decider.met(paid_s)
        began, ended = self._uploads.get(at, (False, False))
        if began:
            self._upload_s = start_s
            self._decider.uploading(start_s, None)
        if ended:
            self._decider.uploading(self._upload_s, self._now_s)
        if at in run.uncounted:
            return
        self._decider.iteration(
            Iteration(
                start_s,
                self._now_s,
                held_s,
                None,
                at not in run.irregular,
                not self._active,
                waited_s,
                met_s,
            )
        )

    def _decide(self, at: int) -> None:
        verdict = self._decider.due(step=self._step, now_s=self._now_s)
        if verdict is Verdict.TAKE:
            self._take(at + 1)
        if verdict is not self._verdict:
            self._num_late += verdict is Verdict.LATE
            self._num_withheld += verdict is Verdict.NO_BUDGET
        self._verdict = verdict

    def _take(self, at: int) -> None:
        plan, cost = self._decider.plan, self._cost(at)
        copied_s = self._now_s + max(cost.copy_s, cost.held_s[0] if cost.held_s else 0.0)
        end_s = max(copied_s, self._busy_until_s) + cost.tail_s
        flight = _Flight(
            name=f"{at}",
            cost=cost,
            start_s=self._now_s,
            end_s=end_s,
            work_s=self._work_s,
            is_first=not self._placed,
        )
        self._busy_until_s = end_s
        if flight.is_first:
            self._before = (self._work_s, self._added_s)
        self._decider.started(flight.name, step=self._step, start_s=self._now_s, is_periodic=True)
        self._adding.append(flight)
        self._active.append(flight)
        self._placed.append(Placed(at, None if plan is None else plan.interval_steps))

    def _cost(self, at: int) -> Cost:
        """The first gets the first one's; later ones those near by in the trace, in turn."""
        costs, number = self._series.costs, len(self._placed)
        if number == 0 or len(costs) == 1:
            return costs[0]
        place = bisect_left(self._indices, at)
        first = max(1, min(place - _IN_TURN // 2, len(costs) - _IN_TURN))
        near = costs[first : first + _IN_TURN]
        return near[number % len(near)]


def _by_iteration(series: Series) -> dict[int, tuple[bool, bool]]:
    """In which iterations uploads began, and in which they ended."""
    found: dict[int, tuple[bool, bool]] = {}
    starts_s = series.recording.start_s
    last = len(starts_s) - 1
    for began_s, ended_s in series.recording.uploads:
        first = min(last, max(0, bisect_left(starts_s, began_s) - 1))
        end = min(last, max(first, bisect_left(starts_s, ended_s) - 1))
        found[first] = (True, found.get(first, (False, False))[1])
        found[end] = (found.get(end, (False, False))[0], True)
    return found
