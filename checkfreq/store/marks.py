"""``marks.jsonl``: what was said of a step after it was written, one JSON line each.

A step's directory is never modified, so pins and metrics that come later live here. Later
lines add to earlier ones; ``reset`` forgets them, when a step's place was taken by another.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checkfreq.types import Json

#: A line of marks is about a hundred bytes.
MARKS_MAX_BYTES = 64 << 20

logger = logging.getLogger(__name__)

_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True, slots=True)
class StepMark:
    """What was said of a step after it was written: pinned or not, and its metrics.

    ``finished``: the run is over with this step.
    """

    keep: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    finished: bool = False


def mark_line(
    step: int,
    *,
    keep: bool | None = None,
    metrics: Mapping[str, float] | None = None,
    finished: bool | None = None,
    reset: bool = False,
) -> str:
    """One line, without its newline."""
    told = {name: _as_json(value) for name, value in (metrics or {}).items()}
    record: dict[str, Json] = {"step": step, "keep": keep, "metrics": told}
    if finished is not None:
        record["finished"] = finished
    return json.dumps({**record, "reset": True} if reset else record, allow_nan=False)


def _as_json(value: float) -> Json:
    """JSON has no NaN and no infinities: then a text, "nan", "inf" or "-inf"."""
    return value if math.isfinite(value) else str(float(value))


def _number(value: Json) -> float:
    if type(value) is str and value in _NOT_FINITE:
        return float(value)
    if type(value) is int or type(value) is float:
        return float(value)
    raise TypeError(value)


def read_marks(data: bytes, *, path: Path) -> dict[int, StepMark]:
    """The marks in a file's bytes; lines that are no marks (torn by a crash) are skipped."""
    marks: dict[int, StepMark] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            _apply(marks, json.loads(line))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            # Not quoted: the file may be somebody else's.
            logger.warning("%s: skipped line %d, which is no mark", path, number)
    return marks


def _apply(marks: dict[int, StepMark], record: Json) -> None:
    step, keep, finished = record["step"], record["keep"], record.get("finished")
    metrics = {name: _number(value) for name, value in dict(record["metrics"]).items()}
    if type(step) is not int or not {type(keep), type(finished)} <= {bool, type(None)}:
        raise TypeError(step, keep, finished)
    old = StepMark() if record.get("reset") else marks.get(step, StepMark())
    marks[step] = StepMark(
        old.keep if keep is None else keep,
        {**old.metrics, **metrics},
        old.finished if finished is None else finished,
    )
