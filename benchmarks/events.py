"""What runs write down line by line as JSON: a manager's events, a training's history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file, or of its end; a line that is cut off is left out."""
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
    return [json.loads(line) for line in whole.splitlines()]


def events(chk_dir: Path, kind: str, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """A manager's events of one kind, oldest first; with ``last_bytes`` the latest alone."""
    lines = read_lines(chk_dir / "events.jsonl", last_bytes=last_bytes)
    return [line for line in lines if line["kind"] == kind]
