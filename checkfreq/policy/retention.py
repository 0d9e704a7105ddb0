"""Which committed checkpoints may go. Pure: a list of checkpoints in, steps to remove out.

A policy is asked after a commit, so the newest entry is durable. The store, not the policy,
guarantees that the last valid checkpoint survives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from checkfreq.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a policy may look at: the step, whether it is pinned, the metrics given to it."""

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
