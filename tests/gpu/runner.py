"""Runs stages one after the other, and keeps every JSON line that they print as it comes.

A stage is a program of its own, in a process group of its own, with a time limit. Each line goes to
the file at once, with the stage's name and the seconds since the start: whatever ends the run, what
came before is there. Lines of the runner itself have ``event``: ``run``, ``begins``, ``ends`` or
``skipped``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests import leftovers

ROOT = Path(__file__).resolve().parents[2]
#: Part of a stage's limit: from the interrupt until its group is killed.
CLEAN_UP_S = 5.0
_KEPT_LINES = 25


@dataclass(frozen=True, slots=True)
class Stage:
    """Arguments of Python, and the seconds after which the stage has ended in any case."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float


def as_line(text: str) -> dict[str, Any] | None:
    """The object that is on a line; None for anything else."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


class Lines:
    """A file of JSON lines, each written and shown at once. May be used by several threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        self._began_s = time.monotonic()
        self._lock = threading.Lock()

    @property
    def at_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began_s

    def add(self, stage: str, /, **fields: Any) -> None:
        """Write a line; the name of its stage and the time are ours, whatever it says."""
        line = json.dumps({**fields, "stage": stage, "at_s": round(self.at_s, 2)})
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()
            print(line, flush=True)

    def close(self) -> None:
        self._file.close()


class _Output:
    """What a stage prints: its lines are passed on, the last of all else on each stream is kept."""

    def __init__(self, name: str, process: subprocess.Popen[str], lines: Lines) -> None:
        self.num_wrong = 0
        self._name, self._lines = name, lines
        self._kept = [deque[str](maxlen=_KEPT_LINES) for _ in range(2)]
        streams = zip((process.stdout, process.stderr), self._kept, strict=True)
        self._readers = [
            threading.Thread(target=self._read, args=each, daemon=True) for each in streams
        ]
        for reader in self._readers:
            reader.start()

    @property
    def last(self) -> list[str]:
        """What was kept, of standard output first."""
        return [line for kept in self._kept for line in kept]

    def _read(self, output: IO[str], kept: deque[str]) -> None:
        with output:
            for text in output:
                if (line := as_line(text)) is None:
                    kept.append(text.rstrip())
                    print(text, end="", file=sys.stderr, flush=True)
                else:
                    self.num_wrong += line.get("ok") is False
                    self._lines.add(self._name, **line)

    def wait(self) -> None:
        """Until all of it was read; a process that left the group may keep it open."""
        for reader in self._readers:
            reader.join(CLEAN_UP_S)


def run_all(stages: Sequence[Stage], lines: Lines, *, limit_s: float) -> bool:
    """Run the stages within ``limit_s`` in all; whether each was run, ended well and is right.

    The last ones may get less time than they are given; one with less than half of it is skipped.
    """
    leftovers.mark()
    results = [_run_or_skip(stage, lines, limit_s - lines.at_s) for stage in stages]
    return all(results)


def _run_or_skip(stage: Stage, lines: Lines, left_s: float) -> bool:
    if left_s < stage.limit_s / 2:
        why = f"it may take {stage.limit_s:.0f} s, and {max(0.0, left_s):.0f} s are left"
        lines.add(stage.name, event="skipped", why=why)
        return False
    limit_s = min(stage.limit_s, left_s)
    lines.add(stage.name, event="begins", limit_s=round(limit_s, 1))
    began_s = lines.at_s
    process = subprocess.Popen(
        [sys.executable, *stage.arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    output = _Output(stage.name, process, lines)
    problem = _end_of(process, limit_s)
    output.wait()
    if not problem and output.num_wrong:
        problem = f"{output.num_wrong} of its lines are not as they should be"
    about = {"problem": problem, "output": output.last} if problem else {}
    seconds = round(lines.at_s - began_s, 2)
    lines.add(stage.name, event="ends", ok=not problem, seconds=seconds, **about)
    return not problem


def _end_of(process: subprocess.Popen[str], limit_s: float) -> str:
    """Why it has no good end; "" if it has. What is late is interrupted, then its group killed."""
    try:
        status = process.wait(max(limit_s - CLEAN_UP_S, limit_s / 2))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(CLEAN_UP_S, limit_s / 2))
        return f"it did not end within {limit_s:.3g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it left behind
        process.wait()
        leftovers.end_lingering()
    return "" if status == 0 else f"it ended with status {status}"
