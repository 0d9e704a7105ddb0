"""Many failures at costs that never vary: step through one start, replay it up to each failure.

With steady costs, no noise, and never two checkpoints in flight at once, a start is determined by
the steps at which it takes checkpoints; all times follow from them. One start is stepped through
as far as any failure lets it come, or until its intervals repeat, whichever is first.

If the intervals do not repeat within ``_MOST_ITERATIONS``, the last ``_MOST_INTERVALS`` of them are
repeated, or the planned interval if there are fewer than ``_FEW``. Overhead is then right as far as
their mean is typical.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from checkfreq.simulation.costs import Costs
from checkfreq.simulation.engine import FailureClock, Run
from checkfreq.simulation.outcome import Outcome

#: Intervals count as repeating if so many of them do, over so many steps, so many times: longer
#: than any window or pause of the tuner.
_REPEATED_INTERVALS = 24
_REPEATED_STEPS = 256
_REPETITIONS = 3
_LONGEST_PERIOD = 512
_CHUNK_ITERATIONS = 500
_MOST_ITERATIONS = 100_000
_MOST_INTERVALS = 512
_FEW = 16
#: Two checkpoints may seem to overlap by this part of the time until durable, through rounding.
_ROUNDING = 1e-6


class Overlapping(Exception):
    """Two checkpoints were in flight at once: step through the run instead."""


class FailureFreeRun:
    """A start that no failure ends: ``_starts_s[i]`` is when checkpoint i is taken."""

    def __init__(self, run: Run, costs: Costs, max_overhead: float) -> None:
        self.run = run
        self._costs = costs
        self._bound = max_overhead
        self._steps: list[int] = []
        self._starts_s: list[float] = []
        self._peaks_s: list[float] = []  # the most that overhead has exceeded the bound by
        self._repeating: _Repeating | None = None
        self._next_peaks_s: list[float] = []  # the same, in the first repetition
        self._rise_s = 0.0  # how far peaks rise from one repetition to the next

    def num_taken(self, at_s: float) -> int:
        """Checkpoints started by ``at_s``."""
        while self._repeating is None and self.run.now_s <= at_s:
            self._extend()
        if self._repeating is None or at_s < self._repeating.since_s:
            return bisect_right(self._starts_s, at_s)
        return len(self._starts_s) + self._repeating.num_until(at_s)

    def start_s(self, index: int) -> float:
        """When checkpoint ``index`` starts."""
        if index < len(self._starts_s):
            return self._starts_s[index]
        assert self._repeating is not None
        return self._repeating.at_s(index - len(self._starts_s))

    def work_s(self, index: int) -> float:
        """The progress that checkpoint ``index`` holds."""
        return self.start_s(index) - index * self._costs.cost_s

    def overhead_s(self, at_s: float, num_taken: int) -> float:
        """Time added by checkpoints until ``at_s``."""
        if not num_taken:
            return 0.0
        costs, since_s = self._costs, at_s - self.start_s(num_taken - 1)
        held_s = min(since_s, costs.stall_s)
        slowed_s = max(0.0, min(since_s, costs.durable_s) - costs.stall_s)
        return (num_taken - 1) * costs.cost_s + held_s + costs.slowdown * slowed_s

    def peak_s(self, num_taken: int) -> float:
        """The most by which overhead exceeds the bound at the end of a checkpoint."""
        known = len(self._peaks_s)
        if num_taken <= known or self._repeating is None:
            return self._peaks_s[num_taken - 1] if num_taken else 0.0
        # Each repetition shifts all peaks by the same amount, up or down: the highest is in the
        # first or in the last.
        times, part = divmod(num_taken - known, self._repeating.period)
        highest = [*self._peaks_s[-1:], self._next_peaks_s[-1 if times else part - 1]]
        if times:
            highest.append(self._next_peaks_s[-1] + (times - 1) * self._rise_s)
        if part:
            highest.append(self._next_peaks_s[part - 1] + times * self._rise_s)
        return max(highest)

    def _peak_of(self, index: int) -> float:
        costs = self._costs
        meanwhile_s = (costs.durable_s - costs.stall_s) * (1 - costs.slowdown)
        return (index + 1) * costs.cost_s - self._bound * (self.work_s(index) + meanwhile_s)

    def _extend(self) -> None:
        self.run.go_on(self.run.now_s + _CHUNK_ITERATIONS * self._costs.iteration_s)
        least_s = self._costs.durable_s * (1 - _ROUNDING)
        for taken in self.run.taken[len(self._steps) :]:
            if self._starts_s and taken.start_s - self._starts_s[-1] < least_s:
                raise Overlapping
            self._steps.append(taken.step)
            self._starts_s.append(taken.start_s)
            peak_s = self._peak_of(len(self._steps) - 1)
            self._peaks_s.append(max([peak_s, *self._peaks_s[-1:]]))
        gaps = _repeated([after - before for before, after in pairwise(self._steps)])
        if not gaps and self.run.num_iterations >= _MOST_ITERATIONS:
            gaps = self._typical_gaps()
        if gaps:
            self._repeat(gaps)

    def _typical_gaps(self) -> Sequence[int]:
        gaps = [after - before for before, after in pairwise(self._steps)]
        planned = self.run.planned_steps
        if len(gaps) >= _FEW or planned is None:
            return gaps[len(gaps) // 2 :][-_MOST_INTERVALS:]
        costs = self._costs
        waits_s = (costs.durable_s - costs.cost_s) * (1 - _ROUNDING)
        return [max(planned, math.ceil(waits_s / costs.iteration_s))]

    def _repeat(self, gaps: Sequence[int]) -> None:
        since_s = self._starts_s[-1] if self._starts_s else -self._costs.cost_s
        self._repeating = _Repeating(
            since_s, [gap * self._costs.iteration_s + self._costs.cost_s for gap in gaps]
        )
        known, period = len(self._peaks_s), len(gaps)
        peaks_s = [self._peak_of(index) for index in range(known, known + period + 1)]
        self._rise_s = peaks_s.pop() - peaks_s[0]
        self._next_peaks_s = list(accumulate(peaks_s, max))


class _Repeating:
    """Intervals that repeat endlessly from ``since_s`` on."""

    def __init__(self, since_s: float, intervals_s: Sequence[float]) -> None:
        self.since_s = since_s
        self.period = len(intervals_s)
        self._ends_s = list(accumulate(intervals_s))

    def num_until(self, at_s: float) -> int:
        """Intervals that have ended by ``at_s``."""
        times, left_s = divmod(at_s - self.since_s, self._ends_s[-1])
        return int(times) * self.period + bisect_right(self._ends_s, left_s)

    def at_s(self, index: int) -> float:
        """When interval ``index`` ends."""
        times, part = divmod(index, self.period)
        return self.since_s + times * self._ends_s[-1] + self._ends_s[part]


def _repeated(gaps: Sequence[int]) -> Sequence[int]:
    """The shortest sequence that ``gaps`` end with repeatedly; empty if there is none."""
    for period in range(1, min(_LONGEST_PERIOD, len(gaps) // _REPETITIONS) + 1):
        if _is_repeated(gaps, period):
            return gaps[-period:]
    return ()


def _is_repeated(gaps: Sequence[int], period: int) -> bool:
    num_steps = 0
    for index in range(1, len(gaps) - period + 1):
        if gaps[-index] != gaps[-index - period]:
            return False
        num_steps += gaps[-index]
        is_enough = index >= max(_REPEATED_INTERVALS, (_REPETITIONS - 1) * period)
        if is_enough and num_steps >= _REPEATED_STEPS:
            return True
    return False


def replay(
    run: Run, clock: FailureClock, costs: Costs, *, wall_s: float, max_overhead: float
) -> Outcome:
    """The outcome of ``run``, which has no failures, with the failures of ``clock``.

    Deferred and withheld checkpoints, and ``taken``, are those of one start. Raises Overlapping.
    """
    start = FailureFreeRun(run, costs, max_overhead)
    up_s = progress_s = overhead_s = lost_s = down_s = excess_s = exempt_s = 0.0
    num_checkpoints = 0
    while up_s < wall_s:
        is_failure = clock.next_s < wall_s
        ran_s = min(clock.next_s, wall_s) - up_s
        num_taken = start.num_taken(ran_s)
        num_checkpoints += num_taken
        exempt_s += costs.cost_s if num_taken else 0.0
        carried_s = overhead_s - max_overhead * (progress_s + lost_s)
        excess_s = max(excess_s, carried_s + start.peak_s(num_taken))
        added_s = start.overhead_s(ran_s, num_taken)
        work_s = kept_s = ran_s - added_s
        if is_failure:
            kept_s = _kept_s(start, ran_s, num_taken, costs.durable_s)
        overhead_s += added_s
        progress_s += kept_s
        lost_s += work_s - kept_s
        if not is_failure:
            up_s = wall_s
            break
        failed_s = clock.next_s
        up_s = clock.restarted_s(failed_s, until_s=wall_s)
        down_s += up_s - failed_s
    return replace(
        run.outcome(),
        wall_s=up_s,
        progress_s=progress_s,
        overhead_s=overhead_s,
        lost_s=lost_s,
        down_s=down_s,
        excess_s=excess_s,
        largest_cost_s=costs.cost_s if num_checkpoints else 0.0,
        exempt_s=exempt_s,
        num_iterations=round((progress_s + lost_s) / costs.iteration_s),
        num_failures=clock.num_failures,
        num_checkpoints=num_checkpoints,
    )


def _kept_s(start: FailureFreeRun, ran_s: float, num_taken: int, durable_s: float) -> float:
    """The progress in the newest checkpoint that is durable when a failure strikes."""
    newest = num_taken - 1
    if newest >= 0 and start.start_s(newest) + durable_s > ran_s:
        newest -= 1
    return start.work_s(newest) if newest >= 0 else 0.0
