"""What is known of a committed checkpoint when it is decided which to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a policy may look at.

    ``keep``: pinned, so never removed. ``metrics``: may be NaN or infinite. ``created_s``: Unix
    time of the commit by the clock of the machine that made it, which may jump; 0.0 if unknown.
    ``num_bytes``: its size on disk. ``at_epoch_end``: it was taken at the last boundary of an
    epoch.
    """

    step: int
    keep: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    created_s: float = 0.0
    num_bytes: int = 0
    at_epoch_end: bool = False


def clock_times(checkpoints: Sequence[CheckpointInfo]) -> dict[int, float]:
    """Seconds at which each step was made, on a clock that never goes back.

    ``checkpoints`` ascend by step. Where their clock went back (set right, another machine, a
    time zone that was wrong), no time has passed: otherwise a year of checkpoints would seem to
    be in the future, and nothing that comes after would be kept.
    """
    times: dict[int, float] = {}
    now_s = before_s = checkpoints[0].created_s if checkpoints else 0.0
    for checkpoint in checkpoints:
        now_s += max(0.0, checkpoint.created_s - before_s)
        before_s = checkpoint.created_s
        times[checkpoint.step] = now_s
    return times
