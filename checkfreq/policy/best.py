"""The best checkpoint by a metric. Pure: checkpoints in, a step out.

A value that is NaN or infinite never counts: it does not say how good a model is, and NaN compares
with nothing. Of two equal values the newer checkpoint wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from checkfreq.errors import ConfigError, NoCheckpointError
from checkfreq.policy.retention_info import CheckpointInfo

_PREFIX = "best:"
_DIRECTIONS = {"min": False, "max": True}


@dataclass(frozen=True, slots=True)
class BestName:
    """What ``"best:METRIC"``, ``"best:METRIC:min"`` and ``"best:METRIC:max"`` name.

    ``highest``: whether the highest value is the best one; None if the name does not say.
    """

    metric: str
    highest: bool | None = None

    @classmethod
    def parse(cls, text: str) -> BestName:
        """Read such a name; ConfigError for any other text."""
        rest = text.removeprefix(_PREFIX)
        metric, _, direction = rest.rpartition(":")
        if direction not in _DIRECTIONS:
            metric, direction = rest, ""
        if not text.startswith(_PREFIX) or not metric:
            raise ConfigError(
                f"step={text!r}: expected a number, 'best:METRIC', 'best:METRIC:min' or "
                "'best:METRIC:max'"
            )
        return cls(metric, _DIRECTIONS.get(direction))


def by_value(
    checkpoints: Sequence[CheckpointInfo], metric: str, *, highest: bool
) -> list[CheckpointInfo]:
    """Those that have a finite value of ``metric``, the best one last."""
    rated = [c for c in checkpoints if math.isfinite(c.metrics.get(metric, math.nan))]
    sign = 1.0 if highest else -1.0
    return sorted(rated, key=lambda c: (sign * c.metrics[metric], c.step))


def best_step(checkpoints: Sequence[CheckpointInfo], metric: str, *, highest: bool) -> int | None:
    """The step with the best finite value of ``metric``; None if no checkpoint has one."""
    ranked = by_value(checkpoints, metric, highest=highest)
    return ranked[-1].step if ranked else None


def require_best(
    checkpoints: Sequence[CheckpointInfo], name: BestName, *, highest: bool = False, where: str
) -> int:
    """`best_step` of a name; ``highest`` applies where the name does not say.

    Raises NoCheckpointError, listing the metrics there are, if no checkpoint in ``where`` has it.
    """
    direction = highest if name.highest is None else name.highest
    step = best_step(checkpoints, name.metric, highest=direction)
    if step is None:
        there = sorted({key for c in checkpoints for key in c.metrics})
        raise NoCheckpointError(
            f"{where} has no checkpoint with a finite metric {name.metric!r}; its metrics: "
            f"{', '.join(there) or 'none'}. Give them with save(metrics={{...}})"
        )
    return step
