"""The CheckFreq paper's rules for the interval, for our own engine and for the simulator.

Two rules, each with its tuning; see `Rule`. ``PaperTuner`` is a ``Decider`` (checkfreq.simulation).
It profiles as the paper does, T from the first iterations and then test checkpoints, and never
measures T again. A checkpoint does not start before the previous one is durable. Where the released
code is worse than its rule (a literal bandwidth, saves dropped while one is active, the most
expensive iterations excluded from the first window), this is not: it represents the policy alone.
Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import Profile, is_amount
from checkfreq.policy.tuner import Iteration, Measured, Verdict
from checkfreq.simulation.deciders import NewDecider

#: Iterations at the start that are ignored, and the last one that counts for T, as released.
_FIRST_PROFILED = 5
_PROFILE_ITERATIONS = 100
#: The last one counts: the first also pays for one-time setup.
_TEST_CHECKPOINTS = 2


class Rule(Enum):
    """Which rule chooses the interval k, and how it changes later.

    RELEASED: the released code. A persist must fit into an interval, and nothing else; a window
    (from one checkpoint to the next) above the bound makes k longer by 2, and, unless dynamic,
    the first within it ends the tuning.
    BUDGET: the paper. The cost of a checkpoint must be within the bound too; after a window above
    the bound, k is computed again from the cost measured in that window.
    Neither ever makes k shorter.
    """

    RELEASED = "paper, formula"
    BUDGET = "paper, budget"


_STEP = 2  # of the released tuning


def released_interval(*, full_s: float, snapshot_s: float, iteration_s: float) -> int:
    """k = max(ceil((full - snapshot) / T), 1): a persist fits into it."""
    return _steps(full_s - snapshot_s, iteration_s)


def budget_interval(
    *, cost_s: float, persist_s: float, iteration_s: float, max_overhead: float
) -> int:
    """k = max(ceil(cost / (p T)), ceil(persist / T), 1): within the bound, and a persist fits."""
    return max(_steps(cost_s / max_overhead, iteration_s), _steps(persist_s, iteration_s))


def _steps(amount_s: float, iteration_s: float) -> int:
    return max(1, math.ceil(amount_s / iteration_s * (1 - 1e-9)))


@dataclass(frozen=True, slots=True)
class _Every:
    interval_steps: int


class PaperTuner:
    """Decides at each boundary as the paper did; ``cached`` skips the profiling.

    ``dynamic``: continue tuning after a window within the bound (None: as published, BUDGET does
    and RELEASED does not). ``profile_iterations``: how long to train before the test checkpoint.
    ``first_steps``: the interval before any tuning.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        max_overhead: float = 0.035,
        dynamic: bool | None = None,
        profile_iterations: int = _PROFILE_ITERATIONS,
        cached: Profile | None = None,
    ) -> None:
        if not (is_amount(max_overhead) and 0 < max_overhead < 1):
            raise ConfigError(f"max_overhead: expected a fraction, got {max_overhead!r}")
        self._rule, self._bound = rule, max_overhead
        self._dynamic = rule is Rule.BUDGET if dynamic is None else dynamic
        self._num_profiled = max(1, profile_iterations - _FIRST_PROFILED)
        self._num_skipped = profile_iterations - self._num_profiled
        self._times_s: list[float] = []
        self._window_s: list[float] | None = None  # iterations since the last checkpoint
        self._last_step = 0
        self._active: str | None = None
        self._measured: Measured | None = None
        self._num_tests = 0
        self._is_tuning = True
        self._profile = cached
        self.plan: _Every | None = None
        self.first_steps: int | None = None
        #: The number of windows evaluated so far.
        self.num_windows = 0
        if cached is not None:
            self._begin(cached)

    def profile(self) -> Profile | None:
        """The costs measured before the first interval, which are never measured again."""
        return self._profile

    @property
    def is_tuning(self) -> bool:
        """Whether a window may still change the interval."""
        return self._is_tuning

    def iteration(self, iteration: Iteration) -> None:
        """See RateTuner."""
        if self._window_s is not None:
            self._window_s.append(iteration.duration_s)
        if self._profile is not None:
            return
        if self._measured is not None:
            self._learn(self._measured)
        elif self._active is None and self._num_skipped:
            self._num_skipped -= 1
        elif self._active is None:
            self._times_s.append(iteration.duration_s)

    def started(self, attempt: str, *, step: int, start_s: float, is_periodic: bool) -> None:
        """See RateTuner; the next checkpoint ends the window of the last one."""
        if self._profile is not None and self._window_s and self._is_tuning:
            self._tune(self._window_s, self._profile)
        self._window_s = []
        self._last_step = step
        self._active = attempt

    def ended(self, attempt: str, *, end_s: float, measured: Measured | None) -> None:
        """See RateTuner. A failed test checkpoint is taken again."""
        if attempt == self._active:
            self._active = None
            self._measured = None if self._profile is not None else measured

    def continue_from(self, step: int) -> None:
        """See RateTuner."""
        self._last_step = step

    def met(self, seconds: float) -> None:
        """Ignored: the paper has no meetings of ranks."""

    def due(self, *, step: int, now_s: float) -> Verdict:
        """See RateTuner."""
        if self.plan is None and len(self._times_s) < self._num_profiled:
            return Verdict.MEASURING
        if self._active is not None:
            return Verdict.LATE if self.plan is not None else Verdict.MEASURING
        if self.plan is not None and step - self._last_step < self.plan.interval_steps:
            return Verdict.NOT_YET
        return Verdict.TAKE

    # ---- the interval

    def _learn(self, measured: Measured) -> None:
        """The costs from a test checkpoint, whose last iteration has just ended."""
        self._measured = None
        self._num_tests += 1
        if self._num_tests == _TEST_CHECKPOINTS:
            self._begin(self._new_profile(measured))

    def _new_profile(self, measured: Measured) -> Profile:
        """The cost of the test checkpoint: its iterations compared with T."""
        assert self._window_s is not None
        iteration_s = fmean(self._times_s)
        cost_s = max(0.0, math.fsum(self._window_s) - len(self._window_s) * iteration_s)
        snapshot_s = measured.device_copy_s or measured.copy_s
        return Profile(
            iteration_s=iteration_s,
            overlap_s=0.0,
            host_copy_s=snapshot_s,
            persist_s=max(0.0, measured.durable_s - snapshot_s),
            durable_s=measured.durable_s,
            cost_s=cost_s,
            cost_upper_s=cost_s,
            state_bytes=measured.state_bytes,
        )

    def _begin(self, profile: Profile) -> None:
        self._profile = profile
        self.first_steps = self._first_interval(profile)
        self.plan = _Every(self.first_steps)
        self._window_s = None  # the test checkpoint's iterations are no window

    def _first_interval(self, profile: Profile) -> int:
        if self._rule is Rule.RELEASED:
            return released_interval(
                full_s=profile.durable_s,
                snapshot_s=profile.durable_s - profile.persist_s,
                iteration_s=profile.iteration_s,
            )
        return self._budget_interval(profile, profile.cost_s)

    def _budget_interval(self, profile: Profile, cost_s: float) -> int:
        return budget_interval(
            cost_s=cost_s,
            persist_s=profile.persist_s,
            iteration_s=profile.iteration_s,
            max_overhead=self._bound,
        )

    def _tune(self, window_s: list[float], profile: Profile) -> None:
        assert self.plan is not None
        self.num_windows += 1
        base_s = len(window_s) * profile.iteration_s
        added_s = math.fsum(window_s) - base_s
        old = self.plan.interval_steps
        if added_s <= self._bound * base_s * (1 + 1e-9):
            self._is_tuning = self._dynamic
        elif self._rule is Rule.RELEASED:
            self.plan = _Every(old + _STEP)
        else:
            self.plan = _Every(max(old, self._budget_interval(profile, added_s)))


def paper_decider(
    rule: Rule,
    *,
    max_overhead: float = 0.035,
    dynamic: bool | None = None,
    known: Profile | None = None,
) -> NewDecider:
    """For `checkfreq.simulation.simulate`; ``known`` (a Costs.profile()) skips the profiling.

    It is skipped for good: a run that restarts after a failure has it cached too.
    """
    return lambda cached: PaperTuner(
        rule, max_overhead=max_overhead, dynamic=dynamic, cached=cached or known
    )
