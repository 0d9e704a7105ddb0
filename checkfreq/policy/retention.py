"""Which committed checkpoints to remove. Pure: a list of checkpoints in, steps to remove out.

A policy is asked after a commit, so the newest entry is durable. The store, not the policy,
guarantees that the last valid checkpoint survives. Policies compose: ``KeepLast(3) |
KeepEvery(hours=24)`` keeps what either of them keeps, ``.within(bytes)`` and ``.within_disk()``
bound the room that they take.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from checkfreq.errors import ConfigError
from checkfreq.policy.best import by_value
from checkfreq.policy.retention_cost import Cost
from checkfreq.policy.retention_info import CheckpointInfo, clock_times
from checkfreq.types import size_text

_HOUR_S = 3600.0


class RetentionPolicy(Protocol):
    """Chooses the checkpoints to remove."""

    def to_remove(self, checkpoints: Sequence[CheckpointInfo]) -> list[int]:
        """Return the steps to remove out of ``checkpoints`` (ascending by step)."""
        ...


class Worth(IntEnum):
    """Why a checkpoint is kept. Where room is short, the least worth goes first."""

    HISTORY = 0
    RECENT = 1
    BEST = 2


class Retention(ABC):
    """A policy that says what it keeps, and why; the base of all that compose.

    The newest checkpoint and pinned ones are always kept, whatever ``kept`` returns.
    """

    __slots__ = ()

    @abstractmethod
    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> dict[int, Worth]:
        """The steps that this policy keeps, and what each is worth.

        ``checkpoints`` are all that there are, ascending by step; pinned ones are no part of the
        result.
        """

    @abstractmethod
    def cost(self) -> Cost:
        """How many checkpoints it keeps."""

    def wants_epoch_ends(self) -> bool:
        """Whether a checkpoint has to be taken at the end of each epoch, for this one to keep."""
        return False

    def fits_disk(self) -> bool:
        """Whether it keeps less where the disk has no room for the next checkpoints."""
        return False

    def prefers_highest(self, metric: str) -> bool:
        """Whether the highest value of ``metric`` is the best one; False where nothing says so."""
        return False

    def to_remove(self, checkpoints: Sequence[CheckpointInfo]) -> list[int]:
        """Return the steps that are neither kept, nor pinned, nor the newest."""
        kept = self.kept(checkpoints)
        return [c.step for c in _may_go(checkpoints) if c.step not in kept]

    def give_up(
        self,
        checkpoints: Sequence[CheckpointInfo],
        num_bytes: int,
        *,
        at_most: Worth = Worth.BEST,
    ) -> list[int]:
        """The steps to remove, ascending, so that at least ``num_bytes`` become free.

        History goes first, then recent ones, then the best, the oldest of each first, up to those
        that are worth ``at_most``. Fewer bytes if nothing else is left but the newest and pinned
        ones.
        """
        kept = self.kept(checkpoints)
        worth = {c.step: kept.get(c.step, Worth.HISTORY) for c in checkpoints}
        order = sorted(_may_go(checkpoints), key=lambda c: (worth[c.step], c.step))
        return sorted(_until_freed((c for c in order if worth[c.step] <= at_most), num_bytes))

    def __or__(self, other: Retention) -> Retention:
        if not isinstance(other, Retention):
            return NotImplemented
        return AnyOf((*_parts(self), *_parts(other)))

    def within(self, num_bytes: int) -> Retention:
        """The same, in at most ``num_bytes`` on disk, pinned checkpoints included.

        Where they do not fit, history goes first, then recent checkpoints, then the best; never the
        newest one.
        """
        return Within(self, num_bytes)

    def within_disk(self) -> Retention:
        """The same, as long as the disk has room for the next two checkpoints."""
        return WithinDisk(self)


@dataclass(frozen=True, slots=True)
class KeepLast(Retention):
    """Keep the newest ``num_kept`` checkpoints."""

    num_kept: int = 3

    def __post_init__(self) -> None:
        if self.num_kept < 1:
            raise ConfigError(f"KeepLast: expected at least 1 checkpoint, got {self.num_kept}")

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> dict[int, Worth]:
        """The newest ``num_kept`` of those that are not pinned."""
        return {c.step: Worth.RECENT for c in _loose(checkpoints)[-self.num_kept :]}

    def cost(self) -> Cost:
        """See Retention."""
        return Cost(most=self.num_kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBest(Retention):
    """Keep the ``num_kept`` checkpoints with the best ``metric``, and the newest ``num_last``.

    The best value is the lowest, or the highest with ``highest=True``; the newer of two equal ones
    wins. A checkpoint without the metric, or with NaN or an infinity, is never among the best.
    """

    metric: str
    highest: bool = False
    num_kept: int = 1
    num_last: int = 3

    def __post_init__(self) -> None:
        for name in ("num_kept", "num_last"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"KeepBest({name}=...): expected at least 1 checkpoint, "
                    f"got {getattr(self, name)}"
                )

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> dict[int, Worth]:
        """The best and the newest of those that are not pinned."""
        loose = _loose(checkpoints)
        ranked = by_value(loose, self.metric, highest=self.highest)
        return {
            **{c.step: Worth.RECENT for c in loose[-self.num_last :]},
            **{c.step: Worth.BEST for c in ranked[-self.num_kept :]},
        }

    def cost(self) -> Cost:
        """See Retention."""
        return Cost(most=self.num_kept + self.num_last)

    def prefers_highest(self, metric: str) -> bool:
        """See Retention."""
        return self.highest and metric == self.metric


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEvery(Retention):
    """Keep one checkpoint every ``hours``, or every ``steps``: the first of each period.

    Periods of hours follow the clock (with ``hours=1``, from full hour to full hour in UTC) and
    periods of steps begin at each multiple of ``steps``, so a checkpoint that was kept once stays
    the first of its period. ``for_hours``: only while it is not older than that, compared with the
    newest one; None keeps it for ever.
    """

    hours: float | None = None
    steps: int | None = None
    for_hours: float | None = None

    def __post_init__(self) -> None:
        if (self.hours is None) == (self.steps is None):
            raise ConfigError(
                f"KeepEvery: expected either hours or steps, got hours={self.hours}, "
                f"steps={self.steps}"
            )
        for name in ("hours", "steps", "for_hours"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"KeepEvery({name}=...): expected more than 0, got {value}")

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> dict[int, Worth]:
        """The first checkpoint of each period that is not pinned."""
        loose, times = _loose(checkpoints), clock_times(checkpoints)
        firsts: dict[int, int] = {}
        for checkpoint in loose:
            firsts.setdefault(self._period(checkpoint, times), checkpoint.step)
        oldest_s = -math.inf
        if self.for_hours is not None and loose:
            oldest_s = times[loose[-1].step] - self.for_hours * _HOUR_S
        # Steps before the first multiple belong to no period.
        counted = {n: step for n, step in firsts.items() if self.steps is None or n > 0}
        return {step: Worth.HISTORY for step in counted.values() if times[step] >= oldest_s}

    def cost(self) -> Cost:
        """See Retention."""
        if self.hours is None:
            return Cost(rates=(f"one every {self.steps} steps",))
        if self.for_hours is None:
            return Cost(per_day=24.0 / self.hours)
        return Cost(most=math.ceil(self.for_hours / self.hours) + 1)

    def _period(self, checkpoint: CheckpointInfo, times: dict[int, float]) -> int:
        if self.steps is not None:
            return checkpoint.step // self.steps
        assert self.hours is not None
        return math.floor(times[checkpoint.step] / (self.hours * _HOUR_S))


@dataclass(frozen=True, slots=True)
class KeepEpochs(Retention):
    """Keep the checkpoints at the end of the newest ``num_kept`` epochs, None: of every epoch.

    The run then takes one at the last boundary of each epoch, however long the interval is.
    """

    num_kept: int | None = None

    def __post_init__(self) -> None:
        if self.num_kept is not None and self.num_kept < 1:
            raise ConfigError(f"KeepEpochs: expected at least 1 epoch, got {self.num_kept}")

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> dict[int, Worth]:
        """Those taken at the end of an epoch that are not pinned."""
        ends = [c.step for c in _loose(checkpoints) if c.at_epoch_end]
        return dict.fromkeys(ends[-(self.num_kept or len(ends)) :], Worth.HISTORY)

    def cost(self) -> Cost:
        """See Retention."""
        if self.num_kept is None:
            return Cost(rates=("one an epoch",))
        return Cost(most=self.num_kept)

    def wants_epoch_ends(self) -> bool:
        """See Retention."""
        return True


@dataclass(frozen=True, slots=True)
class AnyOf(Retention):
    """Keep what any of the ``policies`` keeps; ``a | b`` makes one."""

    policies: tuple[Retention, ...]

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> dict[int, Worth]:
        """What each of them keeps, with the highest worth that any of them sees in it."""
        found: dict[int, Worth] = {}
        for policy in self.policies:
            for step, worth in policy.kept(checkpoints).items():
                found[step] = max(worth, found.get(step, worth))
        return found

    def cost(self) -> Cost:
        """See Retention."""
        return sum((policy.cost() for policy in self.policies), Cost())

    def prefers_highest(self, metric: str) -> bool:
        """See Retention."""
        return any(policy.prefers_highest(metric) for policy in self.policies)

    def wants_epoch_ends(self) -> bool:
        """See Retention."""
        return any(policy.wants_epoch_ends() for policy in self.policies)

    def fits_disk(self) -> bool:
        """See Retention."""
        return any(policy.fits_disk() for policy in self.policies)


@dataclass(frozen=True, slots=True)
class WithinDisk(Retention):
    """Keep what ``policy`` keeps, while the disk has room; ``policy.within_disk()`` makes one."""

    policy: Retention

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> dict[int, Worth]:
        """What the policy keeps: how much room there is, is known where it is asked."""
        return self.policy.kept(checkpoints)

    def cost(self) -> Cost:
        """See Retention."""
        return self.policy.cost() + Cost(bounds=("as far as the disk has room",))

    def prefers_highest(self, metric: str) -> bool:
        """See Retention."""
        return self.policy.prefers_highest(metric)

    def wants_epoch_ends(self) -> bool:
        """See Retention."""
        return self.policy.wants_epoch_ends()

    def fits_disk(self) -> bool:
        """See Retention."""
        return True


@dataclass(frozen=True, slots=True)
class Within(Retention):
    """Keep what ``policy`` keeps, in ``num_bytes``; ``policy.within(num_bytes)`` makes one."""

    policy: Retention
    num_bytes: int

    def __post_init__(self) -> None:
        if self.num_bytes < 1:
            raise ConfigError(f"within({self.num_bytes}): expected at least 1 byte")

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> dict[int, Worth]:
        """What the policy keeps, less what must go for the rest to fit in."""
        kept = self.policy.kept(checkpoints)
        may_go = {c.step for c in _may_go(checkpoints)}
        staying = [c for c in checkpoints if c.step in kept or c.step not in may_go]
        excess = sum(c.num_bytes for c in staying) - self.num_bytes
        gone = self.policy.give_up(staying, excess)
        return {step: worth for step, worth in kept.items() if step not in gone}

    def cost(self) -> Cost:
        """See Retention."""
        return self.policy.cost() + Cost(bounds=(f"in at most {size_text(self.num_bytes)}",))

    def prefers_highest(self, metric: str) -> bool:
        """See Retention."""
        return self.policy.prefers_highest(metric)

    def wants_epoch_ends(self) -> bool:
        """See Retention."""
        return self.policy.wants_epoch_ends()

    def fits_disk(self) -> bool:
        """See Retention."""
        return self.policy.fits_disk()


def _loose(checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    return sorted((c for c in checkpoints if not c.keep), key=lambda c: c.step)


def _may_go(checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """All but the pinned ones and the newest of all."""
    newest = max((c.step for c in checkpoints), default=None)
    return [c for c in _loose(checkpoints) if c.step != newest]


def _until_freed(order: Iterable[CheckpointInfo], num_bytes: int) -> list[int]:
    """The first steps of ``order`` that have ``num_bytes`` together."""
    steps = []
    for checkpoint in order:
        if num_bytes <= 0:
            break
        steps.append(checkpoint.step)
        num_bytes -= checkpoint.num_bytes
    return steps


def _parts(policy: Retention) -> tuple[Retention, ...]:
    return policy.policies if isinstance(policy, AnyOf) else (policy,)


#: What CFManager keeps unless it is told otherwise: at AUTO's intervals the last three may span
#: seconds, and a run that diverges must be able to go back further.
DEFAULT_RETENTION = (
    KeepLast(3) | KeepEvery(hours=1, for_hours=24) | KeepEvery(hours=24)
).within_disk()
