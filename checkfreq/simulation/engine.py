"""One training run, iteration by iteration, with checkpoints and failures.

The loop does what a manager does: an iteration ends, the decider (a ``RateTuner``) is told of
it and of the checkpoints that became durable meanwhile, and is asked whether to take one. After a
failure the run continues from the newest durable checkpoint, with a new decider.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import Profile
from checkfreq.policy.tuner import Iteration, Measured, Verdict
from checkfreq.simulation.costs import (
    CorrelatedSpread,
    Costs,
    Noise,
    Rhythm,
    Trace,
    spread,
)
from checkfreq.simulation.deciders import Decider, NewDecider
from checkfreq.simulation.failures import Failures
from checkfreq.simulation.outcome import Outcome, Taken
from checkfreq.simulation.windows import Windows

#: An iteration takes 3 to 15 us to step through (2026-11): a longer run could take minutes.
_MOST_ITERATIONS = 1_000_000
_MOST_FAILURES = 1_000_000
#: A rhythm must not slow training down to a standstill: no iteration would end.
_MOST_SLOWDOWN = 0.95


@dataclass(slots=True, eq=False)
class _Attempt:
    name: str
    step: int
    work_s: float  # progress at its boundary, which a restore brings back
    start_s: float
    held_until_s: float
    end_s: float
    copy_s: float
    persist_s: float
    state_bytes: int
    is_exempt: bool
    cost_s: float = 0.0


class Run:
    """A run in progress; use ``simulate`` (run.py)."""

    def __init__(
        self,
        trace: Trace,
        new_decider: NewDecider,
        *,
        failures: Failures,
        restart_s: float,
        noise: Noise,
        rhythm: Rhythm,
        seed: int,
        max_overhead: float,
        keep_profile: bool,
    ) -> None:
        self._trace = trace
        self._new_decider = new_decider
        self._restart_s = restart_s
        self._noise, self._rhythm = noise, rhythm
        self._bound = max_overhead
        self._keep_profile = keep_profile
        # Not the generator of FailureClock: all deciders must meet the same failures.
        self._random = Random(f"costs {seed}")
        self._spread = CorrelatedSpread(self._random, noise.iterations, noise.correlation)
        self.clock = FailureClock(failures, restart_s=restart_s, seed=seed)
        self.now_s = self.work_s = 0.0
        self.overhead_s = self.lost_s = self.down_s = 0.0
        self._excess_s = self._largest_s = self._exempt_s = 0.0
        self._windows = Windows(max_overhead)
        self._step = self.num_iterations = 0
        self._num_deferred = self._num_withheld = 0
        self.taken: list[Taken] = []
        self._restore_point = (0, 0.0)  # step and progress of the newest durable checkpoint
        self._begin(None)

    def go_on(self, until_s: float) -> None:
        """Step until the first boundary at or after ``until_s``."""
        while self.now_s < until_s:
            if not self._iterate():
                self._fail(self.clock.next_s, until_s)
            elif self.now_s >= self.clock.notice_at_s:
                self._use_notice(until_s)

    @property
    def planned_steps(self) -> int | None:
        """The interval planned now."""
        plan = self._decider.plan
        return plan.interval_steps if plan else None

    def outcome(self) -> Outcome:
        """The outcome so far; work that is not in a durable checkpoint yet counts as progress."""
        return Outcome(
            wall_s=self.now_s,
            progress_s=self.work_s,
            overhead_s=self.overhead_s,
            lost_s=self.lost_s,
            down_s=self.down_s,
            excess_s=self._excess_s,
            window_excess_s=self._windows.worst_s,
            largest_cost_s=max([self._largest_s, *(a.cost_s for a in self._attempts)]),
            exempt_s=self._exempt_s + sum(a.cost_s for a in self._attempts if a.is_exempt),
            num_iterations=self.num_iterations,
            num_failures=self.clock.num_failures,
            num_checkpoints=len(self.taken),
            num_deferred=self._num_deferred,
            num_withheld=self._num_withheld,
            taken=tuple(self.taken),
            planned_steps=self.planned_steps,
        )

    # ---- training

    def _begin(self, cached: Profile | None) -> None:
        self._decider: Decider = self._new_decider(cached)
        self._attempts: list[_Attempt] = []
        self._held_s = 0.0  # stall of the next iteration, by the checkpoint just started
        self._busy_until_s = 0.0  # when the worker will be idle
        self._slowed = 1.0  # rhythm: factor of the slowdown until then
        self._is_first = True
        self._last_verdict: Verdict | None = None

    def _iterate(self) -> bool:
        """Run one iteration and decide after it; False if a failure comes before its end."""
        start_s, held_s = self.now_s, self._held_s
        costs = self._trace.at(start_s)
        work_s = costs.iteration_s * self._rhythm.iteration(self.num_iterations)
        if self._noise.iterations:
            work_s *= self._spread.next()
        end_s = _end_of(start_s + held_s, work_s, self._busy_until_s, self._slowdown(costs))
        if end_s > self.clock.next_s:
            return False
        if self.num_iterations >= _MOST_ITERATIONS:
            raise _too_long(self.now_s)
        self._held_s = 0.0
        self.now_s = end_s
        self.work_s += work_s
        self._step += 1
        self.num_iterations += 1
        bounded_s = 0.0
        if self._attempts:
            bounded_s = self._charge(start_s, held_s, end_s - start_s - work_s)
            self._finish(end_s)
        self._windows.add(work_s, bounded_s)
        self._decider.iteration(
            Iteration(start_s, end_s, held_s, is_quiet=self._busy_until_s <= end_s)
        )
        self._decide(costs)
        return True

    def _charge(self, start_s: float, held_s: float, extra_s: float) -> float:
        """Charge the stall to its checkpoint, and share the slowdown among the active ones.

        Returns the part of those that the bound covers.
        """
        exempt_s = sum(a.cost_s for a in self._attempts if a.is_exempt)
        self._attempts[-1].cost_s += held_s
        shares = [min(a.end_s, self.now_s) - max(a.start_s, start_s) for a in self._attempts]
        slowdown_s, whole = extra_s - held_s, sum(shares) or 1.0
        for attempt, share in zip(self._attempts, shares, strict=True):
            attempt.cost_s += slowdown_s * share / whole
        self.overhead_s += extra_s
        above_s = self.overhead_s - self._bound * (self.work_s + self.lost_s)
        self._excess_s = max(self._excess_s, above_s)
        return extra_s - (sum(a.cost_s for a in self._attempts if a.is_exempt) - exempt_s)

    def _finish(self, now_s: float) -> None:
        for attempt in [a for a in self._attempts if a.end_s <= now_s]:
            self._attempts.remove(attempt)
            self._count(attempt)
            self._restore_point = (attempt.step, attempt.work_s)
            self._decider.ended(
                attempt.name,
                end_s=attempt.end_s,
                measured=Measured(
                    copy_s=attempt.copy_s,
                    persist_s=attempt.persist_s,
                    durable_s=attempt.end_s - attempt.start_s,
                    state_bytes=attempt.state_bytes,
                ),
            )

    def _count(self, attempt: _Attempt) -> None:
        self._largest_s = max(self._largest_s, attempt.cost_s)
        if attempt.is_exempt:
            self._exempt_s += attempt.cost_s

    def _decide(self, costs: Costs) -> None:
        verdict = self._decider.due(step=self._step, now_s=self.now_s)
        if verdict is Verdict.TAKE:
            self._take(costs)
        if verdict is not self._last_verdict:
            self._num_deferred += verdict is Verdict.LATE
            self._num_withheld += verdict is Verdict.NO_BUDGET
        self._last_verdict = verdict

    def _take(self, costs: Costs) -> None:
        plan = self._decider.plan
        attempt = self._new_attempt(self._now_costing(costs))
        self._decider.started(attempt.name, step=self._step, start_s=self.now_s, is_periodic=True)
        self._attempts.append(attempt)
        self._held_s = attempt.held_until_s - self.now_s
        self._busy_until_s = attempt.end_s
        self._slowed = self._rhythm.slowdown(len(self.taken))
        self._is_first = False
        self.taken.append(Taken(self._step, self.now_s, plan.interval_steps if plan else None))

    def _now_costing(self, costs: Costs) -> Costs:
        sigma = self._noise.checkpoints
        return costs.times(spread(self._random, sigma)) if sigma else costs

    def _slowdown(self, costs: Costs) -> float:
        return min(_MOST_SLOWDOWN, costs.slowdown * self._slowed)

    def _new_attempt(self, costs: Costs) -> _Attempt:
        copied_s = self.now_s + max(costs.stall_s, costs.copy_s)
        return _Attempt(
            name=f"{self._step}-{len(self.taken)}",
            step=self._step,
            work_s=self.work_s,
            start_s=self.now_s,
            held_until_s=self.now_s + costs.stall_s,
            end_s=max(copied_s, self._busy_until_s) + costs.persist_s,
            copy_s=costs.copy_s,
            persist_s=costs.persist_s,
            state_bytes=costs.state_bytes,
            is_exempt=self._is_first,
        )

    # ---- failures

    def _fail(self, at_s: float, until_s: float) -> None:
        """A failure at ``at_s``, within an iteration: go back to the newest durable checkpoint."""
        slowdown = self._slowdown(self._trace.at(self.now_s))
        held_until_s = min(at_s, self.now_s + self._held_s)
        extra_s = held_until_s - self.now_s
        extra_s += slowdown * max(0.0, min(at_s, self._busy_until_s) - held_until_s)
        for attempt in self._attempts:
            attempt.cost_s += extra_s / len(self._attempts)
        self.overhead_s += extra_s
        self.work_s += at_s - self.now_s - extra_s
        self._finish(at_s)
        for attempt in self._attempts:
            self._count(attempt)
        step, work_s = self._restore_point
        self.lost_s += self.work_s - work_s
        up_s = self.clock.restarted_s(at_s, until_s=until_s)
        self.down_s += up_s - at_s
        self._restart(up_s, step, work_s)

    def _restart(self, up_s: float, step: int, work_s: float) -> None:
        self.now_s, self._step, self.work_s = up_s, step, work_s
        self._begin(self._decider.profile() if self._keep_profile else None)
        self._decider.continue_from(step)

    def _use_notice(self, until_s: float) -> None:
        """Take a last checkpoint if it can be durable in time; then the run ends by itself.

        It restarts on a different machine at once, before the old one is taken away.
        """
        self.clock.notice_at_s = math.inf
        attempt = self._last_attempt()
        if attempt.end_s > self.clock.next_s:
            return
        ended_s = attempt.end_s
        if attempt in self._attempts:
            self._attempts.remove(attempt)
        else:
            self.taken.append(Taken(self._step, self.now_s, None))
        attempt.cost_s = ended_s - self.now_s
        attempt.is_exempt = True
        self._finish(ended_s)
        self._count(attempt)
        self.overhead_s += attempt.cost_s
        self._restore_point = (self._step, self.work_s)
        up_s = self.clock.restarted_s(self.clock.next_s, from_s=ended_s, until_s=until_s)
        self.down_s += up_s - ended_s
        self._restart(up_s, self._step, self.work_s)

    def _last_attempt(self) -> _Attempt:
        """The attempt begun at this boundary, or a new one."""
        if self._attempts and self._attempts[-1].start_s == self.now_s:
            return self._attempts[-1]
        return self._new_attempt(self._now_costing(self._trace.at(self.now_s)))


class FailureClock:
    """Draws the times of failures; some processes can also strike during restarts."""

    def __init__(self, failures: Failures, *, restart_s: float, seed: int) -> None:
        self._failures = failures
        self._restart_s = restart_s
        self._mean_s = failures.mean_s(restart_s)
        self._random = Random(f"failures {seed}")
        self.num_failures = 0
        self.next_s = self.notice_at_s = math.inf
        self._draw_next(0.0)

    def restarted_s(self, at_s: float, *, until_s: float, from_s: float | None = None) -> float:
        """A failure strikes at ``at_s``; returns when training continues.

        Failures during the restart are drawn up to ``until_s``. ``from_s``: when the restart
        began, if that was not at ``at_s``.
        """
        self.num_failures += 1
        up_s = (at_s if from_s is None else from_s) + self._restart_s
        self._draw_next(at_s if self._failures.in_restarts else up_s)
        while self.next_s < min(up_s, until_s):
            self.num_failures += 1
            up_s = self.next_s + self._restart_s
            self._draw_next(self.next_s)
        return up_s

    def _draw_next(self, from_s: float) -> None:
        if self.num_failures > _MOST_FAILURES:
            raise ConfigError(
                f"more than {_MOST_FAILURES} failures: simulate a shorter run, or one that fails "
                f"less often than every {self._mean_s:.3g} s"
            )
        wait_s = math.inf
        if self._mean_s < math.inf:
            wait_s = self._random.expovariate(1 / self._mean_s)
        self.next_s = from_s + wait_s
        has_notice = self._failures.notice_s > 0 and wait_s < math.inf
        self.notice_at_s = self.next_s - self._failures.notice_s if has_notice else math.inf


def _end_of(start_s: float, work_s: float, busy_until_s: float, slowdown: float) -> float:
    """When work that starts at ``start_s`` is done, slowed down until ``busy_until_s``."""
    if busy_until_s <= start_s or not slowdown:
        return start_s + work_s
    slowed_s = (busy_until_s - start_s) * (1 - slowdown)
    if work_s <= slowed_s:
        return start_s + work_s / (1 - slowdown)
    return busy_until_s + work_s - slowed_s


def _too_long(now_s: float) -> ConfigError:
    return ConfigError(
        f"more than {_MOST_ITERATIONS} iterations to step through ({now_s:.3g} s simulated so "
        "far): simulate a shorter run, or longer iterations"
    )
