"""The log of a run for people and tools: ``chk_dir/events.jsonl``, one JSON line per event.

The trainer and its worker process both append. Each line is one ``write`` to a descriptor opened
with O_APPEND, so lines of two processes never interleave. The store's file operations, which are
passed in, open the file. Recovery never reads events, and a failure to write one is ignored after
a single warning. The file is kept short: see ``LineFile``.
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
    """One thing that happened: its ``kind`` (a word), the step, and more data by name."""

    kind: str
    step: int
    data: Mapping[str, Any] = field(default_factory=dict)
    time_unix_s: float = field(default_factory=time.time)

    def to_json(self) -> str:
        """One line of JSON, without the newline and without fields that are None, at any depth."""
        head = {"time_unix_s": round(self.time_unix_s, 6), "kind": self.kind, "step": self.step}
        record = {**head, **_without_nulls(self.data)}
        try:
            return json.dumps(record, default=str, allow_nan=False)
        except ValueError:  # rare, so tried last: JSON has no NaN and no infinities
            return json.dumps(_finite(json.loads(json.dumps(record, default=str))))


@dataclass(frozen=True, slots=True)
class FailureNotice:
    """The argument of ``CFConfig.on_failure``: a checkpoint failed, or they work again.

    ``step``: the step of the checkpoint. ``error``: why it failed; None if it is durable, after
    failures. ``num_in_row``: how many have failed in a row. ``durable_step``: the newest durable
    checkpoint; None if there is none yet. ``durable_unix_s``: when that became known, or when the
    run began. ``steps_at_risk``: iterations that would be lost if the run were killed now.
    ``retry_in_s``: pause before the next periodic checkpoint is tried; 0 if that comes at the next
    interval as usual.
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


@dataclass(frozen=True, slots=True)
class StopRecord:
    """The argument of ``CFConfig.on_stop``: this run stops, or its last checkpoint is durable.

    ``source``: a signal's name, or "deadline", "slurm", "aws", "gcp" or "azure"; with many ranks
    followed by the rank, as in "SIGTERM (rank 1)". ``why``: the same in words. ``step``: the step
    of the last checkpoint. ``is_durable``: whether that is on disk. ``ends_at_unix_s``: when the
    run will be ended; None if nobody said.
    """

    source: str
    why: str
    step: int
    is_durable: bool
    ends_at_unix_s: float | None = None


class WritesLines(Protocol):
    """The part of `checkfreq.store.fileops.FileOps` that a log needs."""

    def append_line(self, path: Path, line: str) -> None:
        """Append a line."""

    def file_size(self, path: Path) -> int:
        """The length of a file in bytes."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def rename(self, src: Path, dst: Path) -> None:
        """Rename a file to a name that is not in use."""


class LineFile:
    """Appends lines to a file of bounded length, which it opens for each call.

    When a line has made the file longer than ``max_bytes``, the file is renamed to ``NAME.1.EXT``
    and replaces the one before. So the newest lines are always in one of the two; the new file
    appears with the next line. ``max_bytes`` None: a different process renames. A failure to write
    is ignored after one warning, which says that ``what`` is not being recorded.
    """

    def __init__(self, path: Path, ops: WritesLines, *, max_bytes: int | None, what: str) -> None:
        self._path = path
        self._ops = ops
        self._max_bytes = max_bytes
        self._what = what
        self._warned = False

    def append(self, line: str) -> bool:
        """Append a line; returns whether the next one begins a new file.

        Never raises OSError: a full disk must not stop training.
        """
        try:
            self._ops.append_line(self._path, line)
            return self._turn_over()
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("%s are not being recorded in %s: %s", self._what, self._path, error)
            return False

    def _turn_over(self) -> bool:
        """Rename the file if it has become too long; returns whether it was."""
        if self._max_bytes is None or self._ops.file_size(self._path) <= self._max_bytes:
            return False
        # Only one process renames: two could replace each other's file. The worker, which may
        # outlive that process, adds a line or two at most.
        older = older_generation(self._path)
        with contextlib.suppress(FileNotFoundError):
            self._ops.unlink(older)
        self._ops.rename(self._path, older)
        return True


class EventLog:
    """Appends events to a `LineFile`. With ``ops`` None it does nothing."""

    def __init__(
        self, path: Path, ops: WritesLines | None, *, max_bytes: int | None = None
    ) -> None:
        self._file = (
            None if ops is None else LineFile(path, ops, max_bytes=max_bytes, what="events")
        )

    def append(self, event: Event) -> None:
        """Append one line. Never raises OSError: a full disk must not stop training."""
        if self._file is not None:
            self._file.append(event.to_json())


def older_generation(path: Path) -> Path:
    """The path of the older lines, those before the ones in ``path``. It may not exist."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def _without_nulls(data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` without what is None: in each line of a long run that would be wasted bytes."""
    return {
        name: _without_nulls(value) if isinstance(value, Mapping) else value
        for name, value in data.items()
        if value is not None
    }


def _finite(value: Any) -> Any:
    """``value`` with text in place of the numbers that JSON does not have."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case dict():
            return {name: _finite(one) for name, one in value.items()}
        case list():
            return [_finite(one) for one in value]
    return value
