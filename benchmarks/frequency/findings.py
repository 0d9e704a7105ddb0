"""What windows of several ways to checkpoint one loop say: smallest intervals, and who wins.

Pure. A `Setting` is an arm and an interval k, and ``tried`` has its overhead in paired windows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.lab.derived import recovery_s
from benchmarks.lab.estimate import Estimate, Smallest, median_interval

Setting = tuple[str, int]

_ALLOWED_RATIO = 0.5


@dataclass(frozen=True, slots=True)
class Cost:
    """What one checkpoint of an arm costs, alone; medians, and their 95 % intervals. Seconds."""

    cost_s: float
    cost_interval_s: tuple[float, float]
    durable_s: float
    durable_interval_s: tuple[float, float]
    smallest: Smallest
    iteration_s: float
    num_saves: int

    def lost_s(self, k: int) -> float:
        """Of training, by a kill, on average."""
        return recovery_s(
            restore_s=0.0, steps=k, iteration_s=self.iteration_s, durable_s=self.durable_s
        )


@dataclass(frozen=True, slots=True)
class Equal:
    """Ours at an interval, and the other with the lowest overhead there.

    ``is_apart``: our whole 95 % interval is below the other's.
    """

    k: int
    rival: str
    ours: float
    theirs: float
    is_apart: bool

    @property
    def met(self) -> bool:
        """Whether ours is lower."""
        return self.ours < self.theirs


@dataclass(frozen=True, slots=True)
class Verdict:
    """Our smallest interval against that of the ``rival`` that has the smallest of the others."""

    k: int
    rival: str
    k_rival: int
    is_kept: bool
    allowed: float = _ALLOWED_RATIO

    @property
    def ratio(self) -> float:
        """Ours over the other's."""
        return self.k / self.k_rival

    @property
    def met(self) -> bool:
        """At most what is allowed, ours being one that kept the bound in windows."""
        return self.is_kept and self.ratio <= self.allowed


@dataclass(slots=True)
class Findings:
    """Of arm ``ours`` and of ``rivals``, whose checkpoints survive as much as ours."""

    ours: str
    rivals: Collection[str]
    bound: float
    costs: dict[str, Cost] = field(default_factory=dict)
    tried: dict[Setting, Estimate] = field(default_factory=dict)
    #: Of these those that count for nobody's smallest interval: tried for another reason, they
    #: would be more tries than the others have.
    aside: set[Setting] = field(default_factory=set)

    def keeps(self, setting: Setting) -> bool:
        """Whether an interval that was tried keeps the bound, and its saves never wait.

        Chance must be known; an interval that is shorter than costs say must keep it beyond that.
        """
        name, k = setting
        found, smallest = self.tried[setting], self.costs[name].smallest
        is_shown = found.mean <= self.bound and math.isfinite(found.high)
        is_certain = found.meets(self.bound, margin=0.0)
        return is_shown and (k >= smallest.k or is_certain) and k >= smallest.by_storage

    def smallest_kept(self, name: str) -> int | None:
        """The smallest that was tried and kept the bound."""
        counted = [x for x in self.tried if x[0] == name and x not in self.aside]
        return min((k for name, k in counted if self.keeps((name, k))), default=None)

    def smallest(self, name: str) -> int:
        """By costs or as tried, whichever is smaller."""
        kept, by_cost = self.smallest_kept(name), self.costs[name].smallest.k
        return by_cost if kept is None else min(kept, by_cost)

    def next_to_try(self, setting: Setting) -> int:
        """After an interval: a shorter one if it kept the bound, else a longer one."""
        name, k = setting
        if setting not in self.tried:
            return k
        overhead = self.tried[setting].mean
        wished = math.ceil(k * overhead / self.bound * (1 - 1e-9))
        if overhead <= self.bound:
            return max(self.costs[name].smallest.by_storage, min(k - 1, wished), 1)
        return max(k + 1, min(wished, 4 * k))

    def closest(self, count: int) -> list[str]:
        """So many rivals, those first whose costs allow the shortest intervals."""
        return sorted(self.rivals, key=lambda name: self.costs[name].smallest.k)[:count]

    def verdict(self) -> Verdict:
        """Of the smallest intervals. Ours must have been tried; others are believed their costs."""
        rivals = {name: self.smallest(name) for name in self.rivals}
        rival = min(rivals, key=lambda name: rivals[name])
        kept = self.smallest_kept(self.ours)
        k = self.costs[self.ours].smallest.k if kept is None else kept
        return Verdict(k, rival, rivals[rival], is_kept=kept is not None)

    def equal(self, k: int) -> Equal:
        """Overhead of all at ``k``."""
        rival = min(self.rivals, key=lambda name: self.tried[name, k].mean)
        ours, theirs = self.tried[self.ours, k], self.tried[rival, k]
        return Equal(k, rival, ours.mean, theirs.mean, is_apart=ours.high < theirs.low)


@dataclass(frozen=True, slots=True)
class Alone:
    """One checkpoint alone: what it added, how long it held training, and until it was durable.

    ``persist_s`` is known of who has two slots: one is copied to while the other is persisted.
    """

    cost_s: float
    held_s: float
    durable_s: float
    persist_s: float | None = None

    @property
    def busy_s(self) -> float:
        """For how long training must go on before there is room for the next one."""
        if self.persist_s is None:
            return max(0.0, self.durable_s - self.held_s)
        return max(self.persist_s, self.durable_s - self.persist_s)


def cost_of(checkpoints: Sequence[Alone], *, iteration_s: float, bound: float) -> Cost:
    """From one checkpoint after the other."""
    costs_s = [each.cost_s for each in checkpoints]
    durable_s = [each.durable_s for each in checkpoints]
    busy_s = median(each.busy_s for each in checkpoints)
    cost_s = median(costs_s)
    return Cost(
        cost_s=cost_s,
        cost_interval_s=median_interval(costs_s),
        durable_s=median(durable_s),
        durable_interval_s=median_interval(durable_s),
        smallest=Smallest.of(
            cost_s=max(0.0, cost_s), busy_s=busy_s, iteration_s=iteration_s, bound=bound
        ),
        iteration_s=iteration_s,
        num_saves=len(checkpoints),
    )
