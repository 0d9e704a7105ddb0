"""What happened, one JSON line each, appended to ``chk_dir/events.jsonl``.

Both the trainer and its persist worker append. A line is one ``write`` to a descriptor
opened with O_APPEND, so lines of two processes never interleave; how files are opened is for
the store's file operations, which are passed in. Events explain; recovery never reads them,
and a failure to write one is ignored after a single warning. The file is kept short: see
``EventLog``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from checkfreq.errors import CheckFreqError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: ``kind`` (a word), the step it concerns, and its data."""

    kind: str
    step: int
    data: Mapping[str, Any] = field(default_factory=dict)
    time_unix_s: float = field(default_factory=time.time)

    def to_json(self) -> str:
        """One line without a newline; fields that are None are left out, also inside of fields."""
        head = {"time_unix_s": round(self.time_unix_s, 6), "kind": self.kind, "step": self.step}
        record = {**head, **_without_nulls(self.data)}
        try:
            return json.dumps(record, default=str, allow_nan=False)
        except ValueError:  # rarely: JSON has no NaN and no infinities
            return json.dumps(_finite(json.loads(json.dumps(record, default=str))))


@dataclass(frozen=True, slots=True)
class FailureNotice:
    """What ``CFConfig.on_failure`` is told: a checkpoint failed, or they work again.

    ``step`` is the checkpoint's and ``error`` why it failed; None: it is durable, after
    failures. ``durable_step`` is the newest one that is durable, None if there was none yet;
    ``durable_unix_s`` when that became known, or when the run began. ``steps_at_risk`` are the
    iterations that a kill would lose now. ``retry_in_s``: the pause before the next periodic one
    is tried; 0: it comes at the next interval.
    """

    step: int
    error: CheckFreqError | None
    num_in_row: int
    durable_step: int | None
    durable_unix_s: float
    steps_at_risk: int
    retry_in_s: float

    @property
    def is_over(self) -> bool:
        """Whether checkpoints work again."""
        return self.error is None


class WritesLines(Protocol):
    """The part of `checkfreq.store.fileops.FileOps` that a log needs."""

    def append_line(self, path: Path, line: str) -> None:
        """Append a line."""

    def file_size(self, path: Path) -> int:
        """Length in bytes."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def rename(self, src: Path, dst: Path) -> None:
        """Move a file to a name that is free."""


class EventLog:
    """Appends events to a file (``ops`` None: nowhere); keeps nothing open between calls.

    A file of more than ``max_bytes`` becomes the older generation (``events.1.jsonl``) in place of
    the one before it, once an event is in it: the newest are always in one of the two. Killed
    between that and the next event, there is no new file yet, and nothing of the newest is lost.
    None: whoever appends leaves that to another.
    """

    def __init__(
        self, path: Path, ops: WritesLines | None, *, max_bytes: int | None = None
    ) -> None:
        self._path = path
        self._ops = ops
        self._max_bytes = max_bytes
        self._warned = False

    def append(self, event: Event) -> None:
        """Append one line; a full or read-only disk must not stop training."""
        if self._ops is None:
            return
        try:
            self._ops.append_line(self._path, event.to_json())
            self._turn_over(self._ops)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("events are not being recorded in %s: %s", self._path, error)

    def _turn_over(self, ops: WritesLines) -> None:
        """Begin a new file if this one has become too long."""
        if self._max_bytes is None or ops.file_size(self._path) <= self._max_bytes:
            return
        # Only this process renames: the worker that outlives it appends a line or two.
        older = older_generation(self._path)
        with contextlib.suppress(FileNotFoundError):
            ops.unlink(older)
        ops.rename(self._path, older)


def older_generation(path: Path) -> Path:
    """Where the events before those in ``path`` are, if there are any."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def _without_nulls(data: Mapping[str, Any]) -> dict[str, Any]:
    """What is not known yet is not worth its bytes, in each line of a long run."""
    return {
        name: _without_nulls(value) if isinstance(value, Mapping) else value
        for name, value in data.items()
        if value is not None
    }


def _finite(value: Any) -> Any:
    """With texts in the place of numbers that JSON does not have."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case dict():
            return {name: _finite(one) for name, one in value.items()}
        case list():
            return [_finite(one) for one in value]
    return value
