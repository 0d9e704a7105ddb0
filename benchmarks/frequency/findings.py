"""The conclusions from measured windows: the smallest interval of each arm, and the best arm.

Pure. A `Setting` is an arm and an interval k; ``tried`` has its overhead in paired windows.
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
    """The cost of a single checkpoint of an arm; medians and their 95 % intervals, in seconds."""

    cost_s: float
    cost_interval_s: tuple[float, float]
    durable_s: float
    durable_interval_s: tuple[float, float]
    smallest: Smallest
    iteration_s: float
    num_saves: int

    def lost_s(self, k: int) -> float:
        """The training time that a kill loses on average."""
        return recovery_s(
            restore_s=0.0, steps=k, iteration_s=self.iteration_s, durable_s=self.durable_s
        )


@dataclass(frozen=True, slots=True)
class Equal:
    """Ours at an interval, and the other arm with the lowest overhead there.

    ``is_apart``: our whole 95 % interval is below the other's.
    """

    k: int
    rival: str
    ours: float
    theirs: float
    is_apart: bool

    @property
    def met(self) -> bool:
        """Whether our overhead is lower."""
        return self.ours < self.theirs


@dataclass(frozen=True, slots=True)
class Verdict:
    """Our smallest interval against the smallest one of all rivals, that of ``rival``."""

    k: int
    rival: str
    k_rival: int
    is_kept: bool
    allowed: float = _ALLOWED_RATIO

    @property
    def ratio(self) -> float:
        """Our interval divided by the rival's."""
        return self.k / self.k_rival

    @property
    def met(self) -> bool:
        """Whether the ratio is within the target, and our interval kept the bound when measured."""
        return self.is_kept and self.ratio <= self.allowed


@dataclass(slots=True)
class Findings:
    """The findings for arm ``ours`` and its ``rivals``, whose checkpoints are as durable."""

    ours: str
    rivals: Collection[str]
    bound: float
    costs: dict[str, Cost] = field(default_factory=dict)
    tried: dict[Setting, Estimate] = field(default_factory=dict)
    #: Settings that do not count as a smallest interval: they were measured for a different
    #: purpose, and would give an arm more attempts than the others have.
    aside: set[Setting] = field(default_factory=set)

    def keeps(self, setting: Setting) -> bool:
        """Whether a measured interval keeps the bound, and its saves never wait.

        Its confidence interval must be known. An interval shorter than the costs suggest must keep
        the bound with its upper limit too.
        """
        name, k = setting
        found, smallest = self.tried[setting], self.costs[name].smallest
        is_shown = found.mean <= self.bound and math.isfinite(found.high)
        is_certain = found.meets(self.bound, margin=0.0)
        return is_shown and (k >= smallest.k or is_certain) and k >= smallest.by_storage

    def smallest_kept(self, name: str) -> int | None:
        """The smallest interval that was measured and kept the bound."""
        counted = [x for x in self.tried if x[0] == name and x not in self.aside]
        return min((k for name, k in counted if self.keeps((name, k))), default=None)

    def smallest(self, name: str) -> int:
        """The smaller of the calculated and the measured interval."""
        kept, by_cost = self.smallest_kept(name), self.costs[name].smallest.k
        return by_cost if kept is None else min(kept, by_cost)

    def next_to_try(self, setting: Setting) -> int:
        """The next interval to try: a shorter one if the last kept the bound, else a longer one."""
        name, k = setting
        if setting not in self.tried:
            return k
        overhead = self.tried[setting].mean
        wished = math.ceil(k * overhead / self.bound * (1 - 1e-9))
        if overhead <= self.bound:
            return max(self.costs[name].smallest.by_storage, min(k - 1, wished), 1)
        return max(k + 1, min(wished, 4 * k))

    def closest(self, count: int) -> list[str]:
        """Up to ``count`` rivals, those with the shortest calculated intervals first."""
        return sorted(self.rivals, key=lambda name: self.costs[name].smallest.k)[:count]

    def verdict(self) -> Verdict:
        """Compare the smallest intervals. Ours must be measured, a rival's may be calculated."""
        rivals = {name: self.smallest(name) for name in self.rivals}
        rival = min(rivals, key=lambda name: rivals[name])
        kept = self.smallest_kept(self.ours)
        k = self.costs[self.ours].smallest.k if kept is None else kept
        return Verdict(k, rival, rivals[rival], is_kept=kept is not None)

    def equal(self, k: int) -> Equal:
        """The overhead of all arms at ``k``."""
        rival = min(self.rivals, key=lambda name: self.tried[name, k].mean)
        ours, theirs = self.tried[self.ours, k], self.tried[rival, k]
        return Equal(k, rival, ours.mean, theirs.mean, is_apart=ours.high < theirs.low)


@dataclass(frozen=True, slots=True)
class Alone:
    """A single checkpoint: what it added, how long it stopped training, and the time to durable.

    ``persist_s`` is known for an arm with two slots: it copies to one while the other persists.
    """

    cost_s: float
    held_s: float
    durable_s: float
    persist_s: float | None = None

    @property
    def busy_s(self) -> float:
        """How long training must continue before the next checkpoint can start."""
        if self.persist_s is None:
            return max(0.0, self.durable_s - self.held_s)
        return max(self.persist_s, self.durable_s - self.persist_s)


def cost_of(checkpoints: Sequence[Alone], *, iteration_s: float, bound: float) -> Cost:
    """The costs of an arm, from single checkpoints measured one after the other."""
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
