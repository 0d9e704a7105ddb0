"""Reads ``trace.jsonl``, which `checkfreq.pacing.trace` writes: the times of real runs.

A trace may come from anybody: sizes are bounded, every value is checked, and an error names the
file and the line. Lines that are no JSON, torn by a full disk or a crash, are left out and counted.
A file whose name ends in ``.gz`` is compressed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkfreq.errors import ConfigError, NoCheckpointError, storage_errors
from checkfreq.events import older_generation
from checkfreq.pacing.trace import FORMAT_VERSION, MARK, NAME
from checkfreq.policy.profile import LONGEST_S, Profile, is_amount
from checkfreq.store.fileops import LocalFileOps
from checkfreq.types import Json, Objective

#: What a run writes at most is an eighth of it.
_MOST_BYTES = 64 << 20
_MOST_ITERATIONS = 1_000_000
#: No run ever counted more steps.
_MOST_STEPS = 1 << 62
_MOST_TEXT = 80


@dataclass(frozen=True, slots=True)
class Recorded:
    """A checkpoint of the run: seconds, instants since the run's first boundary.

    stall_s: training was held. copy_s, persist_s: 0 if it failed. durable_s: from its start until
    it was durable, or had failed. told_s: until the trainer knew. planned_steps: the interval that
    was planned when it was begun.
    """

    step: int
    reason: str
    start_s: float
    stall_s: float
    copy_s: float
    persist_s: float
    durable_s: float
    told_s: float
    state_bytes: int
    planned_steps: int | None
    has_failed: bool

    @property
    def end_s(self) -> float:
        """When it was durable, or had failed."""
        return self.start_s + self.durable_s


@dataclass(slots=True)
class Recording:
    """One run. Lists of iterations have one value each, in order; seconds.

    start_s, took_s: from boundary to boundary, of which ``held_s`` was the manager's, ``waited_s``
    the user's and ``met_s`` the ranks' meetings. paid_s: meetings charged to the bound before the
    iteration was over. irregular, busy, uncounted: numbers of iterations (uncounted: slots were
    being prepared, so that the policy was not told). origin: where the trace is from, if it says.
    num_torn: lines that were no JSON, and are left out.
    """

    name: str
    run: str
    from_step: int = 0
    max_overhead: float = 0.035
    mtbf_s: float | None = None
    objective: Objective = Objective.BOUND
    num_slots: int = 2
    dynamic: bool = True
    interval_steps: int | None = None
    cached: Profile | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    start_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)
    waited_s: dict[int, float] = field(default_factory=dict)
    met_s: dict[int, float] = field(default_factory=dict)
    paid_s: dict[int, float] = field(default_factory=dict)
    irregular: set[int] = field(default_factory=set)
    busy: set[int] = field(default_factory=set)
    uncounted: set[int] = field(default_factory=set)
    checkpoints: list[Recorded] = field(default_factory=list)
    uploads: list[tuple[float, float]] = field(default_factory=list)
    num_torn: int = 0

    @property
    def num_iterations(self) -> int:
        """How many were recorded."""
        return len(self.took_s)


def read_trace(path: Path) -> Recording:
    """The longest run in a file, or in the directory of a run that recorded its trace.

    NoCheckpointError if a directory has none; ConfigError for what is no trace of this version;
    StorageError if it cannot be read.
    """
    runs = [run for run in _runs(path) if run.num_iterations]
    if not runs:
        raise ConfigError(f"{path}: expected a trace with iterations, found none")
    return max(runs, key=lambda run: run.num_iterations)


def _runs(path: Path) -> list[Recording]:
    runs: dict[str, Recording] = {}
    for each in _files(path):
        reader = _Reader(each, runs)
        for number, line in enumerate(_lines(each), start=1):
            reader.read(number, line)
    return list(runs.values())


def _files(path: Path) -> list[Path]:
    ops = LocalFileOps(path.parent, direct=False)
    with storage_errors(f"{path}: cannot read the trace"):
        if not ops.is_dir(path):
            return [path]
        there = LocalFileOps(path, direct=False).listdir(path)
    newest = path / NAME
    found = [each for each in (older_generation(newest), newest) if each.name in there]
    if not found:
        raise NoCheckpointError(
            f"{path}: expected a directory with {NAME}, found none: train with "
            "CFConfig(record_trace=True)"
        )
    return found


def _lines(path: Path) -> Sequence[bytes]:
    ops = LocalFileOps(path.parent, direct=False)
    with storage_errors(f"{path}: cannot read the trace"):
        data = ops.read_bytes(path, max_bytes=_MOST_BYTES)
    if path.suffix == ".gz":
        data = _unpacked(path, data)
    return data.split(b"\n")


def _unpacked(path: Path, data: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        found = unpacker.decompress(data, _MOST_BYTES)
    except zlib.error as error:
        raise ConfigError(f"{path}: expected a file compressed by gzip: {error}") from None
    if unpacker.unconsumed_tail:
        raise ConfigError(f"{path}: expected at most {_MOST_BYTES} bytes unpacked, found more")
    return found


class _UnusableError(Exception):
    """What is wrong with a line."""


class _Reader:
    """Reads one file's lines into ``runs``, by the name of the run."""

    def __init__(self, path: Path, runs: dict[str, Recording]) -> None:
        self._path = path
        self._runs = runs
        self._run: Recording | None = None
        self._unit_s = 0.0

    def read(self, number: int, line: bytes) -> None:
        """Take in a line."""
        if not line.strip():
            return
        found = _parsed(line)
        if found is None and self._run is not None:
            self._run.num_torn += 1
            return
        try:
            self._take(found)
        except (_UnusableError, ConfigError) as why:
            raise ConfigError(f"{self._path}, line {number}: {why}") from None

    def _take(self, line: Mapping[str, Json] | None) -> None:
        if line is None:
            raise _UnusableError("expected a JSON object")
        if MARK in line:
            self._begin(line)
        elif self._run is None:
            raise _UnusableError(f"expected a header with {MARK}, as {NAME} begins")
        elif "took" in line:
            self._add_iterations(self._run, line)
        elif "checkpoint" in line:
            self._run.checkpoints.append(self._checkpoint(line))
        elif "upload" in line:
            self._run.uploads.append(self._upload(line))
        else:
            raise _UnusableError("expected iterations, a checkpoint or an upload")

    # ---- kinds of lines

    def _begin(self, line: Mapping[str, Json]) -> None:
        version = line[MARK]
        if type(version) is not int or version < 1:
            raise _UnusableError(f"{MARK}: expected a version, got {_shown(version)}")
        if version > FORMAT_VERSION:
            raise _UnusableError(
                f"expected a trace of version {FORMAT_VERSION}, found {version}: a newer "
                "checkfreq wrote it, and can replay it"
            )
        self._unit_s = _seconds(line, "unit_s")
        if not 1e-9 <= self._unit_s <= 1.0:
            raise _UnusableError(f"unit_s: expected 1e-9 to 1 second, got {self._unit_s}")
        run = _text(line, "run")
        if run not in self._runs:
            self._runs[run] = _header(self._path.name, run, line)
        self._run = self._runs[run]

    def _add_iterations(self, run: Recording, line: Mapping[str, Json]) -> None:
        took, held = self._times(line, "took"), self._times(line, "held")
        if len(took) != len(held) or not took:
            raise _UnusableError(
                f"expected as many times in held as in took, found {len(held)} and {len(took)}"
            )
        first = run.num_iterations
        if first + len(took) > _MOST_ITERATIONS:
            raise _UnusableError(f"expected at most {_MOST_ITERATIONS} iterations")
        if not all(took_s > 0 for took_s in took):
            raise _UnusableError("took: expected times > 0")
        at_s = self._instant(line.get("at"), "at")
        if first:  # a device's clock, which is fitted to the host's, may step back a little
            at_s = max(at_s, run.start_s[-1] + run.took_s[-1])
        for took_s in took:
            run.start_s.append(at_s)
            at_s += took_s
        run.took_s += took
        run.held_s += held
        for name in ("waited", "met", "paid"):
            getattr(run, f"{name}_s").update(self._sparse(line, name, first, len(took)))
        for name in ("irregular", "busy", "uncounted"):
            some = _list(line, name)
            getattr(run, name).update(first + _number(name, at, len(took)) for at in some)

    def _checkpoint(self, line: Mapping[str, Json]) -> Recorded:
        planned = line.get("planned")
        if planned is not None:
            planned = _number("planned", planned, _MOST_STEPS)
        return Recorded(
            step=_number("checkpoint", line["checkpoint"], _MOST_STEPS),
            reason=_text(line, "reason"),
            start_s=self._instant(line.get("start"), "start"),
            stall_s=self._time(line.get("stall"), "stall"),
            copy_s=self._time(line.get("copy", 0), "copy"),
            persist_s=self._time(line.get("persist", 0), "persist"),
            durable_s=self._time(line.get("durable"), "durable"),
            told_s=self._time(line.get("told"), "told"),
            state_bytes=_number("bytes", line.get("bytes", 0), _MOST_STEPS),
            planned_steps=planned,
            has_failed=line.get("failed") is True,
        )

    def _upload(self, line: Mapping[str, Json]) -> tuple[float, float]:
        match line["upload"]:
            case [began, took]:
                began_s = self._instant(began, "upload")
                return began_s, began_s + self._time(took, "upload")
        raise _UnusableError("upload: expected two numbers, its beginning and its length")

    # ---- values

    def _times(self, line: Mapping[str, Json], name: str) -> list[float]:
        return [self._time(value, name) for value in _list(line, name)]

    def _time(self, value: Json, name: str) -> float:
        if type(value) is int and 0 <= value <= LONGEST_S / self._unit_s:
            return value * self._unit_s
        raise _UnusableError(f"{name}: expected a whole number >= 0, got {_shown(value)}")

    def _instant(self, value: Json, name: str) -> float:
        """Like a time, but a little before the first boundary is possible."""
        if type(value) is int and abs(value) <= LONGEST_S / self._unit_s:
            return value * self._unit_s
        raise _UnusableError(f"{name}: expected a whole number, got {_shown(value)}")

    def _sparse(
        self, line: Mapping[str, Json], name: str, first: int, num: int
    ) -> Iterator[tuple[int, float]]:
        for pair in _list(line, name):
            match pair:
                case [at, value]:
                    yield first + _number(name, at, num + 1), self._time(value, name)
                case _:
                    raise _UnusableError(f"{name}: expected pairs, got {_shown(pair)}")


def _header(name: str, run: str, line: Mapping[str, Json]) -> Recording:
    cached, mtbf_s, steps = (line.get(key) for key in ("cached", "mtbf_s", "interval_steps"))
    objective, origin = line.get("objective", "bound"), line.get("origin", {})
    if objective not in [each.value for each in Objective]:
        raise _UnusableError(f"objective: expected bound or goodput, got {_shown(objective)}")
    if not (cached is None or isinstance(cached, dict)):
        raise _UnusableError(f"cached: expected a profile, got {_shown(cached)}")
    if not isinstance(origin, dict) or not all(isinstance(each, str) for each in origin.values()):
        raise _UnusableError(f"origin: expected texts by name, got {_shown(origin)}")
    bound = _seconds(line, "max_overhead")
    if not 0 < bound < 1:
        raise _UnusableError(f"max_overhead: expected a fraction between 0 and 1, got {bound}")
    return Recording(
        name,
        run,
        from_step=_number("from_step", line.get("from_step", 0), _MOST_STEPS),
        max_overhead=bound,
        mtbf_s=None if mtbf_s is None else _seconds(line, "mtbf_s") or None,
        objective=Objective(objective),
        num_slots=max(1, _number("num_slots", line.get("num_slots", 2), 1000)),
        dynamic=line.get("dynamic") is not False,
        interval_steps=None if steps is None else _number("interval_steps", steps, _MOST_STEPS),
        cached=None if cached is None else Profile.from_dict(cached),
        origin=origin,
    )


def _parsed(line: bytes) -> dict[str, Json] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _list(line: Mapping[str, Json], name: str) -> list[Any]:
    found = line.get(name, [])
    if not isinstance(found, list):
        raise _UnusableError(f"{name}: expected a list, got {_shown(found)}")
    return found


def _number(name: str, value: Json, limit: int) -> int:
    if type(value) is int and 0 <= value < limit:
        return value
    raise _UnusableError(
        f"{name}: expected a whole number from 0 to {limit - 1}, got {_shown(value)}"
    )


def _seconds(line: Mapping[str, Json], name: str) -> float:
    value = line.get(name)
    if is_amount(value) and float(value) <= LONGEST_S:  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    raise _UnusableError(f"{name}: expected a number >= 0, got {_shown(value)}")


def _text(line: Mapping[str, Json], name: str) -> str:
    value = line.get(name)
    if isinstance(value, str) and value:
        return value[:_MOST_TEXT]
    raise _UnusableError(f"{name}: expected a text, got {_shown(value)}")


def _shown(value: Json) -> str:
    """A value from outside, short."""
    return repr(value)[:_MOST_TEXT]
