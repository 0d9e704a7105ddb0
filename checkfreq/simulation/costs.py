"""The costs of a simulated run, as functions of simulated time. Seconds.

A checkpoint that starts at a boundary holds training for ``stall_s``. Its copy begins at the
boundary too and may outlast the stall; then the worker persists, one checkpoint after the other.
From the end of the stall until the checkpoint is durable, training loses the fraction ``slowdown``
of its speed. The visible cost o is therefore not an input: it is the stall plus the slowdown.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import Profile, is_amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs at one instant. ``slowdown``: fraction of speed lost to a copy or persist."""

    iteration_s: float
    stall_s: float
    copy_s: float = 0.0
    persist_s: float = 0.0
    slowdown: float = 0.0
    state_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("iteration_s", "stall_s", "copy_s", "persist_s", "slowdown", "state_bytes"):
            if not is_amount(getattr(self, name)):
                raise ConfigError(
                    f"Costs.{name}: expected a finite number >= 0, got {getattr(self, name)!r}"
                )
        if not self.iteration_s > 0:
            raise ConfigError(f"Costs.iteration_s: expected more than 0 s, got {self.iteration_s}")
        if not self.slowdown < 1:
            raise ConfigError(f"Costs.slowdown: expected a part below 1, got {self.slowdown}")

    @property
    def durable_s(self) -> float:
        """From the boundary until it is durable (L), if the worker is idle."""
        return max(self.stall_s, self.copy_s) + self.persist_s

    @property
    def cost_s(self) -> float:
        """What one checkpoint adds to the training time (o)."""
        return self.stall_s + self.slowdown * (self.durable_s - self.stall_s)

    def times(self, factor: float) -> Costs:
        """Checkpoints that cost ``factor`` times as much; iterations as before."""
        return replace(
            self,
            stall_s=factor * self.stall_s,
            copy_s=factor * self.copy_s,
            persist_s=factor * self.persist_s,
        )

    def profile(self) -> Profile:
        """The profile that exact measurements of these costs would give."""
        return Profile(
            iteration_s=self.iteration_s,
            overlap_s=0.0,
            host_copy_s=self.copy_s,
            persist_s=self.persist_s,
            durable_s=self.durable_s,
            cost_s=self.cost_s,
            cost_upper_s=self.cost_s,
            state_bytes=self.state_bytes,
        )


def smallest_interval(costs: Costs, *, max_overhead: float) -> int:
    """The oracle: the smallest interval in iterations that keeps the bound and never waits.

    With two slots: a copy may run while the previous checkpoint is being persisted.
    """
    keeps_bound = _steps(costs.cost_s / max_overhead, costs.iteration_s)
    return max(keeps_bound, unwaiting_interval(costs))


def unwaiting_interval(costs: Costs) -> int:
    """The smallest interval in iterations at which no checkpoint waits for the one before."""
    return _steps(max(costs.persist_s, costs.copy_s), costs.iteration_s)


def _steps(amount_s: float, iteration_s: float) -> int:
    return max(1, math.ceil(amount_s / iteration_s * (1 - 1e-9)))  # not one more for rounding


class Trace(Protocol):
    """Costs over time. ``is_steady``: they never change."""

    @property
    def is_steady(self) -> bool: ...

    def at(self, now_s: float) -> Costs:
        """Costs of what begins at ``now_s``."""
        ...


@dataclass(frozen=True, slots=True)
class _Steady:
    costs: Costs
    is_steady: bool = True

    def at(self, now_s: float) -> Costs:
        return self.costs


def steady(costs: Costs) -> Trace:
    """The same costs throughout."""
    return _Steady(costs)


class _Changing:
    is_steady = False

    def __init__(self, changes: Sequence[tuple[float, Costs]], period_s: float | None) -> None:
        self._starts_s = [start_s for start_s, _ in changes]
        self._costs = [costs for _, costs in changes]
        self._period_s = period_s

    def at(self, now_s: float) -> Costs:
        if self._period_s is not None:
            now_s %= self._period_s
        return self._costs[bisect_right(self._starts_s, now_s) - 1]


def changing(changes: Sequence[tuple[float, Costs]], *, period_s: float | None = None) -> Trace:
    """Costs that change at the given instants, the first at 0; ``period_s``: repeatedly."""
    starts_s = [start_s for start_s, _ in changes]
    if not starts_s or starts_s[0] != 0 or starts_s != sorted(set(starts_s)):
        raise ConfigError(f"changing: expected instants that ascend from 0, got {starts_s}")
    if period_s is not None and not period_s > starts_s[-1]:
        raise ConfigError(f"changing: a period of {period_s} s ends before its last change")
    return _Changing(changes, period_s)


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative spread of iterations and of checkpoints: 0.3 is about 30 %. Means do not change.

    correlation: of each iteration with the one before, as on a machine shared with others.
    """

    iterations: float = 0.0
    checkpoints: float = 0.0
    correlation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("iterations", "checkpoints", "correlation"):
            if not (is_amount(getattr(self, name)) and getattr(self, name) <= 1):
                raise ConfigError(
                    f"Noise.{name}: expected a part from 0 to 1, got {getattr(self, name)!r}"
                )

    def __bool__(self) -> bool:
        return self.iterations > 0 or self.checkpoints > 0


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Periodic factors of iteration times, and of the slowdown by each checkpoint; empty: none."""

    iterations: tuple[float, ...] = ()
    slowdowns: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("iterations", "slowdowns"):
            factors = getattr(self, name)
            if not all(is_amount(factor) and factor > 0 for factor in factors):
                raise ConfigError(f"Rhythm.{name}: expected finite factors > 0, got {factors}")

    def __bool__(self) -> bool:
        return bool(self.iterations or self.slowdowns)

    def iteration(self, index: int) -> float:
        """The factor of iteration ``index``."""
        return self.iterations[index % len(self.iterations)] if self.iterations else 1.0

    def slowdown(self, index: int) -> float:
        """The factor of checkpoint ``index``."""
        return self.slowdowns[index % len(self.slowdowns)] if self.slowdowns else 1.0


def spread(random: Random, sigma: float) -> float:
    """A random positive factor of mean 1 (lognormal)."""
    return random.lognormvariate(-sigma * sigma / 2, sigma) if sigma else 1.0


class CorrelatedSpread:
    """Random factors of mean 1, each correlated with the one before (AR(1) in the exponent)."""

    def __init__(self, random: Random, sigma: float, correlation: float) -> None:
        self._random = random
        self._sigma = sigma
        self._kept = correlation
        self._fresh = math.sqrt(1 - correlation * correlation)
        self._level: float | None = None

    def next(self) -> float:
        """The next factor."""
        if not self._kept:
            return spread(self._random, self._sigma)
        drawn = self._random.normalvariate(0.0, 1.0)
        if self._level is None:
            self._level = drawn
        else:
            self._level = self._kept * self._level + self._fresh * drawn
        return math.exp(self._sigma * (self._level - self._sigma / 2))
