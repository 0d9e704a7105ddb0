"""What happened, one JSON line each, appended to ``chk_dir/events.jsonl``.

Both the trainer and its persist worker append. A line is one ``write`` to a descriptor
opened with O_APPEND, so lines of two processes never interleave; how it is opened is for the
store's file operations, which are passed in. Events explain; recovery
never reads them, and a failure to write one is ignored after a single warning.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: ``kind`` (a word), the step it concerns, and its data."""

    kind: str
    step: int
    data: Mapping[str, Any] = field(default_factory=dict)
    time_unix_s: float = field(default_factory=time.time)

    def to_json(self) -> str:
        """One line without a newline."""
        head = {"time_unix_s": round(self.time_unix_s, 6), "kind": self.kind, "step": self.step}
        return json.dumps({**head, **self.data}, default=str)


class AppendsLines(Protocol):
    """The part of `checkfreq.store.fileops.FileOps` that a log needs."""

    def append_line(self, path: Path, line: str) -> None:
        """Append a line."""


class EventLog:
    """Appends events to a file (``ops`` None: nowhere); keeps nothing open between calls."""

    def __init__(self, path: Path, ops: AppendsLines | None) -> None:
        self._path = path
        self._ops = ops
        self._warned = False

    def append(self, event: Event) -> None:
        """Append one line; a full or read-only disk must not stop training."""
        if self._ops is None:
            return
        try:
            self._ops.append_line(self._path, event.to_json())
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("events are not being recorded in %s: %s", self._path, error)
