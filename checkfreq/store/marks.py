"""``marks.jsonl``: pins, metrics, ends of epochs and of the run, one JSON line each.

A committed step's directory is never modified, so what is added to a step later is stored here.
Later lines add to earlier ones. A line with ``reset`` drops the earlier ones of its step, when a
different checkpoint of the same step was committed.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checkfreq.types import Json

#: A line has about a hundred bytes, so this is more than any run writes.
MARKS_MAX_BYTES = 64 << 20

logger = logging.getLogger(__name__)

_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True, slots=True)
class StepMark:
    """The marks of one committed step: pinned or not, its metrics, whether the run ended with it,
    and whether an epoch did.

    ``persist.attempts.Marks`` is what a user asks to have recorded; this is what is on disk.
    """

    keep: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    finished: bool = False
    at_epoch_end: bool = False


def mark_line(
    step: int,
    *,
    keep: bool | None = None,
    metrics: Mapping[str, float] | None = None,
    finished: bool | None = None,
    at_epoch_end: bool = False,
    reset: bool = False,
) -> str:
    """One line, without its newline."""
    values = {name: _as_json(value) for name, value in (metrics or {}).items()}
    record: dict[str, Json] = {"step": step, "keep": keep, "metrics": values}
    if finished is not None:
        record["finished"] = finished
    if at_epoch_end:
        record["at_epoch_end"] = True
    return json.dumps({**record, "reset": True} if reset else record, allow_nan=False)


def line_of(step: int, mark: StepMark) -> str:
    """The one line that says all of a step's marks."""
    return mark_line(
        step,
        keep=mark.keep,
        metrics=mark.metrics,
        finished=mark.finished or None,
        at_epoch_end=mark.at_epoch_end,
    )


def _as_json(value: float) -> Json:
    """JSON has no NaN or infinities: they become the strings "nan", "inf" and "-inf"."""
    return value if math.isfinite(value) else str(float(value))


def _number(value: Json) -> float:
    if type(value) is str and value in _NOT_FINITE:
        return float(value)
    if type(value) is int or type(value) is float:
        return float(value)
    raise TypeError(value)


def read_marks(data: bytes, *, path: Path) -> dict[int, StepMark]:
    """The marks in a file's bytes, by step; skips lines torn by a crash, with a warning."""
    marks: dict[int, StepMark] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            _apply(marks, json.loads(line))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            # The line is not quoted: the file may not be ours, and hold anything.
            logger.warning("%s: skipped line %d, which is not a mark", path, number)
    return marks


def _apply(marks: dict[int, StepMark], record: Json) -> None:
    step, keep, finished = record["step"], record["keep"], record.get("finished")
    at_epoch_end = record.get("at_epoch_end", False)
    metrics = {name: _number(value) for name, value in dict(record["metrics"]).items()}
    if type(step) is not int or not {type(keep), type(finished)} <= {bool, type(None)}:
        raise TypeError(step, keep, finished)
    if type(at_epoch_end) is not bool:
        raise TypeError(at_epoch_end)
    old = StepMark() if record.get("reset") else marks.get(step, StepMark())
    marks[step] = StepMark(
        old.keep if keep is None else keep,
        {**old.metrics, **metrics},
        old.finished if finished is None else finished,
        old.at_epoch_end or at_epoch_end,
    )
