"""The JSON lines that runs write: the events of a manager, the history of a training."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkfreq.events import older_generation


def read_lines(path: Path, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, or of its end; truncated lines are skipped."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = 0 if last_bytes is None else max(0, size - last_bytes)
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return []
    whole = data[: data.rfind(b"\n") + 1]
    if start:
        whole = whole.partition(b"\n")[2]
    return list(_objects(whole))


def _objects(lines: bytes) -> Iterator[dict[str, Any]]:
    """A full disk may have truncated lines in the middle of the file too."""
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def events(chk_dir: Path, kind: str, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """A manager's events of one kind, oldest first; with ``last_bytes`` only the latest."""
    path = chk_dir / "events.jsonl"
    lines = read_lines(path, last_bytes=last_bytes)
    if last_bytes is None or not any(line["kind"] == kind for line in lines):
        lines = read_lines(older_generation(path), last_bytes=last_bytes) + lines
    return [line for line in lines if line["kind"] == kind]
