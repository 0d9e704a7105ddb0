"""Many failures at costs that never vary: one start is run, and replayed up to each failure.

With steady costs, no noise and no two checkpoints under way at once, a start is told by the
steps at which it takes checkpoints: all times follow. It is run as far as a failure leaves it,
and no further than to where the intervals have become equal.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise

from checkfreq.simulation.costs import Costs
from checkfreq.simulation.engine import FailureClock, Run
from checkfreq.simulation.outcome import Outcome

#: So many equal intervals in a row, over so many steps, are taken to go on for ever: longer than
#: any window or stretch of the tuner.
_EQUAL_INTERVALS = 24
_EQUAL_STEPS = 256
_CHUNK_ITERATIONS = 500


class Overlapping(Exception):
    """Two checkpoints were under way at once: run it instead."""


class _Start:
    """From a start on, without failures. ``steps[i]``: where the checkpoint i is taken."""

    def __init__(self, run: Run, costs: Costs, max_overhead: float) -> None:
        self.run = run
        self._costs = costs
        self._bound = max_overhead
        self._steps: list[int] = []
        self._starts_s: list[float] = []
        self._peaks_s: list[float] = []  # the most that overhead was above the bound so far
        self._is_settled = False

    def num_taken(self, at_s: float) -> int:
        """Checkpoints started until ``at_s``."""
        while not self._is_settled and self.run.now_s <= at_s:
            self._extend()
        if not self._is_settled or at_s < self._starts_s[-1]:
            return bisect_right(self._starts_s, at_s)
        return len(self._steps) + int((at_s - self._starts_s[-1]) / self._cycle_s)

    def start_s(self, index: int) -> float:
        """When checkpoint ``index`` starts."""
        beyond = index - len(self._steps) + 1
        if beyond > 0:
            return self._starts_s[-1] + beyond * self._cycle_s
        return self._starts_s[index]

    def work_s(self, index: int) -> float:
        """What checkpoint ``index`` holds."""
        return self.start_s(index) - index * self._costs.cost_s

    def overhead_s(self, at_s: float, num_taken: int) -> float:
        """Added by checkpoints until ``at_s``."""
        if not num_taken:
            return 0.0
        costs, since_s = self._costs, at_s - self.start_s(num_taken - 1)
        held_s = min(since_s, costs.stall_s)
        slowed_s = max(0.0, min(since_s, costs.durable_s) - costs.stall_s)
        return (num_taken - 1) * costs.cost_s + held_s + costs.slowdown * slowed_s

    def peak_s(self, num_taken: int) -> float:
        """The most that overhead was above the bound, a checkpoint being at its end."""
        if not num_taken:
            return 0.0
        known = self._peaks_s[min(num_taken, len(self._peaks_s)) - 1]
        return max(known, self._peak_of(num_taken - 1))

    def _peak_of(self, index: int) -> float:
        costs = self._costs
        meanwhile_s = (costs.durable_s - costs.stall_s) * (1 - costs.slowdown)
        return (index + 1) * costs.cost_s - self._bound * (self.work_s(index) + meanwhile_s)

    @property
    def _cycle_s(self) -> float:
        num_steps = self._steps[-1] - self._steps[-2]
        return num_steps * self._costs.iteration_s + self._costs.cost_s

    def _extend(self) -> None:
        self.run.go_on(self.run.now_s + _CHUNK_ITERATIONS * self._costs.iteration_s)
        for taken in self.run.taken[len(self._steps) :]:
            if self._starts_s and taken.start_s < self._starts_s[-1] + self._costs.durable_s:
                raise Overlapping
            self._steps.append(taken.step)
            self._starts_s.append(taken.start_s)
            peak_s = self._peak_of(len(self._steps) - 1)
            self._peaks_s.append(max([peak_s, *self._peaks_s[-1:]]))
        last = self._steps[-_EQUAL_INTERVALS - 1 :]
        if len(last) > _EQUAL_INTERVALS and self._steps[-1] - _EQUAL_STEPS >= self._steps[0]:
            last = [step for step in self._steps if step >= min(last[0], last[-1] - _EQUAL_STEPS)]
            gaps = {after - before for before, after in pairwise(last)}
            self._is_settled = len(gaps) == 1


def replay(
    run: Run, clock: FailureClock, costs: Costs, *, wall_s: float, max_overhead: float
) -> Outcome:
    """What ``run``, which has no failures, comes to with those of ``clock``.

    Counts of deferred and withheld checkpoints, and ``taken``, are those of one start. Raises
    Overlapping.
    """
    start = _Start(run, costs, max_overhead)
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
        up_s = clock.restarted_s(failed_s)
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


def _kept_s(start: _Start, ran_s: float, num_taken: int, durable_s: float) -> float:
    """Progress in the newest checkpoint that is durable when a failure strikes."""
    newest = num_taken - 1
    if newest >= 0 and start.start_s(newest) + durable_s > ran_s:
        newest -= 1
    return start.work_s(newest) if newest >= 0 else 0.0
