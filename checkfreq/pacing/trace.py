"""``chk_dir/trace.jsonl``: how long each iteration and each phase of a checkpoint took.

Written with ``CFConfig(record_trace=True)``, by rank 0, for ``checkfreq simulate --trace``. Lines
are JSON objects: a header for each run, then iterations many to a line, checkpoints and uploads as
they end. Times are integers in units of ``UNIT_S`` since the header's zero (docs/format.md).

Lines are kept in memory and written when a checkpoint ends, at most every few seconds, so that an
iteration costs an append to a list. The file is bounded (`LineFile`) and never synced: a kill
loses its last seconds, a crash of the machine may tear it. Belongs to the training thread.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkfreq.events import LineFile, WritesLines
from checkfreq.policy.observations import Iteration, Measured
from checkfreq.policy.profile import LONGEST_S

NAME = "trace.jsonl"
FORMAT_VERSION = 1
#: The header's first field: its value is the version.
MARK = "checkfreq_trace"
UNIT_S = 1e-7
#: At 12 bytes an iteration, 350,000 of them; as many again in the older file.
_MOST_BYTES = 4 << 20
_WRITE_EVERY_S = 2.0
#: Iterations without a checkpoint are written too, when there are so many.
_MOST_KEPT = 4096
#: Iterations of a line follow one another; where a clock jumps by more, another line begins.
_LEAST_GAP_S = 1e-3


@dataclass(slots=True)
class _Started:
    step: int
    start_s: float
    reason: str
    planned: int | None


class TraceLog:
    """Writes what a `Profiler` is told. Times are seconds of ``clock``."""

    def __init__(
        self,
        path: Path,
        ops: WritesLines,
        *,
        max_bytes: int = _MOST_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._file = LineFile(path, ops, max_bytes=max_bytes, what="iteration times")
        self._clock = clock
        self._header: dict[str, object] = {}
        self._zero_s = 0.0
        self._written_s = 0.0
        self._needs_header = True
        self._iterations: list[Iteration] = []
        self._uncounted: list[int] = []  # numbers of those
        self._paid: dict[int, float] = {}  # by the number of iterations before
        self._started: dict[str, _Started] = {}
        self._lines: list[str] = []

    def begin(self, **header: object) -> None:
        """A run starts here; ``header``: what a replay needs to know of it, as JSON."""
        self._zero_s = self._written_s = self._clock()
        known = {MARK: FORMAT_VERSION, "run": uuid.uuid4().hex[:12], "unit_s": UNIT_S}
        self._header = {**known, "zero_unix_s": round(time.time(), 3), **header}

    def add(self, iteration: Iteration, *, counts: bool) -> None:
        """An iteration ended; without ``counts`` the tuner was not told of it."""
        if not counts:
            self._uncounted.append(len(self._iterations))
        self._iterations.append(iteration)
        if len(self._iterations) >= _MOST_KEPT:
            self.write()

    def paid(self, seconds: float) -> None:
        """A meeting of the ranks was charged to the bound, after the latest iteration."""
        at = len(self._iterations)
        self._paid[at] = self._paid.get(at, 0.0) + seconds

    def started(
        self, attempt: str, *, step: int, start_s: float, reason: str, planned: int | None
    ) -> None:
        """A snapshot was begun, when the interval was ``planned``."""
        self._started[attempt] = _Started(step, start_s, reason, planned)

    def ended(
        self, attempt: str, *, end_s: float, stall_s: float, measured: Measured | None
    ) -> None:
        """A checkpoint became durable, or failed (``measured`` is None)."""
        start = self._started.pop(attempt, None)
        if start is None:
            return
        line: dict[str, object] = {
            "checkpoint": start.step,
            "reason": start.reason,
            "start": self._units(start.start_s),
            "stall": _units(stall_s),
            "durable": _units(end_s - start.start_s),
            "told": _units(self._clock() - start.start_s),
        }
        if start.planned is not None:
            line["planned"] = start.planned
        if measured is None:
            line["failed"] = True
        else:
            line["copy"] = _units(measured.copy_s)
            line["persist"] = _units(measured.persist_s)
            line["bytes"] = measured.state_bytes
        self._lines.append(_json(line))
        if self._clock() - self._written_s >= _WRITE_EVERY_S:
            self.write()

    def uploading(self, began_s: float, ended_s: float | None) -> None:
        """An upload has ended; of one that only began nothing is written yet."""
        if ended_s is not None:
            self._lines.append(_json({"upload": [self._units(began_s), _units(ended_s - began_s)]}))

    def write(self) -> None:
        """Append what there is to the file."""
        lines = [*self._batches(), *self._lines]
        if self._iterations:  # otherwise what was paid belongs to the next one
            self._paid.clear()
        self._iterations.clear()
        self._uncounted.clear()
        self._lines.clear()
        self._written_s = self._clock()
        if not lines:
            return
        if self._needs_header:
            lines.insert(0, _json(self._header))
            self._header["continues"] = True  # in a file that comes after this one
        self._needs_header = self._file.append("\n".join(lines))

    def _batches(self) -> list[str]:
        """The iterations as lines, each of iterations that follow one another."""
        lines, first = [], 0
        num = len(self._iterations)
        for at in range(1, num):
            gap_s = self._iterations[at].start_s - self._iterations[at - 1].end_s
            if not -_LEAST_GAP_S <= gap_s <= _LEAST_GAP_S:
                lines.append(self._batch(first, at))
                first = at
        lines.append(self._batch(first, num))
        return [line for line in lines if line]

    def _batch(self, first: int, end: int) -> str:
        """Those from ``first`` until before ``end``; nothing if their times are none."""
        some = self._iterations[first:end]
        if not all(each.is_sane() for each in some):
            some = [each for each in some if each.is_sane()]
            end = first + len(some)
        if not some:
            return ""
        start, ended, stall, _, regular, quiet, waited, met = zip(*some, strict=True)
        scale = 1 / UNIT_S
        line: dict[str, object] = {
            "at": self._units(some[0].start_s),
            "took": [round((b - a) * scale) for a, b in zip(start, ended, strict=True)],
            "held": [round(held_s * scale) for held_s in stall],
        }
        sparse: dict[str, list[object]] = {
            "irregular": [at for at, is_regular in enumerate(regular) if not is_regular],
            "busy": [at for at, is_quiet in enumerate(quiet) if not is_quiet],
            "uncounted": [at - first for at in self._uncounted if first <= at < end],
            "waited": [[at, _units(each_s)] for at, each_s in enumerate(waited) if each_s],
            "met": [[at, _units(each_s)] for at, each_s in enumerate(met) if each_s],
            "paid": [
                [at - first, _units(each_s)]
                for at, each_s in self._paid.items()
                if first <= at < end or at == end == len(self._iterations)
            ],
        }
        return _json(line | {name: found for name, found in sparse.items() if found})

    def _units(self, instant_s: float) -> int:
        return _units(instant_s - self._zero_s)


def _units(seconds: float) -> int:
    return round(seconds / UNIT_S) if abs(seconds) <= LONGEST_S else 0  # 0 for NaN too


def _json(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":"))
