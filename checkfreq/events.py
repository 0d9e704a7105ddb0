"""What happened, one JSON line each, appended to ``chk_dir/events.jsonl``.

Both the trainer and its persist worker append. A line is one ``write`` to a descriptor
opened with O_APPEND, so lines of two processes never interleave. Events explain; recovery
never reads them, and a failure to write one is ignored after a single warning. The file is kept
short: see ``EventLog``.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        return json.dumps({**head, **_without_nulls(self.data)}, default=str)


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


class EventLog:
    """Appends events to a file (None: nowhere); keeps nothing open between calls.

    A file of more than ``max_bytes`` becomes the older generation (``events.1.jsonl``) in place of
    the one before it, once an event is in it: the newest are always in one of the two. Killed
    between that rename and the next event, there is no new file yet, and nothing is lost. None:
    whoever appends leaves that to another.
    """

    def __init__(self, path: Path | None, *, max_bytes: int | None = None) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._is_torn = False
        self._warned = False

    def append(self, event: Event) -> None:
        """Append one line; a full or read-only disk must not stop training."""
        if self._path is None:
            return
        line = (event.to_json() + "\n").encode()
        if self._is_torn:  # the line before it was cut off by a full disk
            line = b"\n" + line
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                self._is_torn = os.write(fd, line) < len(line)
                self._turn_over(fd, self._path)
            finally:
                os.close(fd)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("events are not being recorded in %s: %s", self._path, error)

    def _turn_over(self, fd: int, path: Path) -> None:
        """Begin a new file if the one that is open has become too long."""
        size = os.fstat(fd).st_size
        if self._max_bytes is None or size <= self._max_bytes:
            return
        # Only this process renames: the worker that outlives it appends a line or two.
        os.rename(path, older_generation(path))


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
