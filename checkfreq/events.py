"""What happened, one JSON line each, appended to ``chk_dir/events.jsonl``.

Both the trainer and its persist worker append. A line is one ``write`` to a descriptor
opened with O_APPEND, so lines of two processes never interleave. Events explain; recovery
never reads them, and a failure to write one is ignored after a single warning.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        record = {**head, **self.data}
        try:
            return json.dumps(record, default=str, allow_nan=False)
        except ValueError:  # rarely: JSON has no NaN and no infinities
            return json.dumps(_finite(json.loads(json.dumps(record, default=str))))


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


class EventLog:
    """Appends events to a file (None: nowhere); keeps nothing open between calls."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._warned = False

    def append(self, event: Event) -> None:
        """Append one line; a full or read-only disk must not stop training."""
        if self._path is None:
            return
        line = (event.to_json() + "\n").encode()
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(fd, line)
            finally:
                os.close(fd)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("events are not being recorded in %s: %s", self._path, error)
