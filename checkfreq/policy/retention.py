"""Which committed checkpoints to remove. Pure: a list of checkpoints in, steps to remove out.

A policy is asked after a commit, so the newest entry is durable. The store, not the policy,
guarantees that the last valid checkpoint survives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from checkfreq.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a policy may look at: the step, whether it is pinned, and its metrics.

    A metric may be NaN or infinite, which does not compare usefully: see KeepBest.
    """

    step: int
    keep: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class RetentionPolicy(Protocol):
    """Chooses the checkpoints to remove."""

    def to_remove(self, checkpoints: Sequence[CheckpointInfo]) -> list[int]:
        """Return the steps to remove out of ``checkpoints`` (ascending by step)."""
        ...


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the newest ``num_kept`` checkpoints and every pinned one."""

    num_kept: int = 3

    def __post_init__(self) -> None:
        if self.num_kept < 1:
            raise ConfigError(f"KeepLast: expected at least 1 checkpoint, got {self.num_kept}")

    def to_remove(self, checkpoints: Sequence[CheckpointInfo]) -> list[int]:
        """Return all but the newest ``num_kept`` of the checkpoints that are not pinned."""
        loose = sorted(c.step for c in checkpoints if not c.keep)
        return loose[: -self.num_kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBest:
    """Keep the ``num_kept`` checkpoints with the best ``metric``, the newest ``num_last``, and
    every pinned one.

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

    def to_remove(self, checkpoints: Sequence[CheckpointInfo]) -> list[int]:
        """Return those that are neither among the newest, nor the best, nor pinned."""
        loose = sorted((c for c in checkpoints if not c.keep), key=lambda c: c.step)
        rated = [c for c in loose if math.isfinite(c.metrics.get(self.metric, math.nan))]
        sign = 1.0 if self.highest else -1.0
        rated.sort(key=lambda c: (sign * c.metrics[self.metric], c.step))
        kept = {c.step for c in (*loose[-self.num_last :], *rated[-self.num_kept :])}
        return [c.step for c in loose if c.step not in kept]
