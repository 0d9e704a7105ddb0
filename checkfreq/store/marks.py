"""``marks.jsonl``: what was said of a step after it was written, one JSON line each.

A step's directory is never modified, so pins and metrics that come later live here. Later
lines add to earlier ones; ``reset`` forgets them, when a step's place was taken by another.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checkfreq.types import Json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mark:
    """What was said of a step after it was written: pinned or not, and its metrics."""

    keep: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


def mark_line(
    step: int,
    *,
    keep: bool | None = None,
    metrics: Mapping[str, float] | None = None,
    reset: bool = False,
) -> str:
    """One line, without its newline."""
    record: dict[str, Json] = {"step": step, "keep": keep, "metrics": dict(metrics or {})}
    return json.dumps({**record, "reset": True} if reset else record)


def read_marks(data: bytes, *, path: Path) -> dict[int, Mark]:
    """The marks in a file's bytes; lines that are no marks (torn by a crash) are skipped."""
    marks: dict[int, Mark] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            _apply(marks, json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError):
            # Not quoted: the file may be somebody else's.
            logger.warning("%s: skipped line %d, which is no mark", path, number)
    return marks


def _apply(marks: dict[int, Mark], record: Json) -> None:
    step, keep, metrics = record["step"], record["keep"], {**record["metrics"]}
    if type(step) is not int or not (keep is None or type(keep) is bool):
        raise TypeError(step, keep)
    if not all(type(value) in (int, float) for value in metrics.values()):
        raise TypeError(metrics)
    old = Mark() if record.get("reset") else marks.get(step, Mark())
    marks[step] = Mark(old.keep if keep is None else keep, {**old.metrics, **metrics})
