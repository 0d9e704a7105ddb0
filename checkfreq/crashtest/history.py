"""What a life recorded, read back: lines, and the whole state at each of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

from checkfreq.crashtest.plan import VARIABLES

State: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Line:
    """One boundary. ``kind``: begin, step (the state was read), passed (it was not), or end."""

    kind: str
    step: int
    key: str = ""
    changed: State = field(default_factory=dict)
    gone: Sequence[str] = ()
    batches: Sequence[Any] = ()
    fetched: Sequence[Any] = ()
    starts: Sequence[Any] = ()
    losses: Sequence[str] = ()
    seeds: Sequence[Any] = ()
    files: Mapping[str, State] | None = None
    untracked: State = field(default_factory=dict)

    @property
    def served(self) -> Sequence[Any]:
        """What training was given: by CFIterator, or else by any DataLoader."""
        return self.batches or self.fetched


_FIELDS = {one.name for one in fields(Line)}


@dataclass(slots=True)
class Record:
    """The lines of one rank in one life, from its last ``begin`` on."""

    lines: list[Line] = field(default_factory=list)
    has_manager: bool = False
    #: What went wrong in the recorder.
    failures: list[str] = field(default_factory=list)
    #: The process, and when it started (`plan.started`).
    pid: int = 0
    started: int = 0
    #: Added to every step, where a script did not know at which it went on.
    shift: int = 0

    @property
    def begin(self) -> Line | None:
        """What it went on from; None if it did not get so far."""
        return self.lines[0] if self.lines and self.lines[0].kind == "begin" else None

    @property
    def first_step(self) -> int:
        """The step that it went on from."""
        return self.lines[0].step + self.shift if self.lines else 0

    @property
    def last_step(self) -> int:
        """The last step that it reached."""
        return self.lines[-1].step + self.shift if self.lines else 0

    @property
    def end(self) -> Line | None:
        """The last line, if the script came to its end."""
        return self.lines[-1] if self.lines and self.lines[-1].kind == "end" else None

    def steps(self) -> Iterator[tuple[int, Line, State]]:
        """Each line with its step and its whole state, which is empty where it was not read."""
        state: dict[str, str] = {}
        for line in self.lines:
            if line.kind == "passed":
                yield line.step + self.shift, line, {}
                continue
            state = {**state, **line.changed}
            for name in line.gone:
                state.pop(name, None)
            yield line.step + self.shift, line, state

    def at(self, step: int) -> tuple[Line, State] | None:
        """The boundary of a step whose state was read; where a life went on, its beginning."""
        for number, line, state in self.steps():
            if number == step and line.kind in ("begin", "step"):
                return line, state
        return None

    def has_variables(self, step: int) -> bool:
        """Whether the user's variables were read at a boundary."""
        found = self.at(step)
        return found is not None and any(name.startswith(VARIABLES) for name in found[1])

    def keys(self) -> dict[str, int]:
        """The step of each state of the parameters."""
        return {line.key: line.step for line in self.lines if line.key and line.kind != "end"}

    @property
    def num_steps(self) -> int:
        """How many boundaries were passed."""
        return sum(line.kind in ("step", "passed") for line in self.lines)


def read(folder: Path) -> dict[int, Record]:
    """The records of a life by rank."""
    found = {}
    for path in sorted(folder.glob("record-*.jsonl")):
        found[int(path.stem.rpartition("-")[2])] = _record(path.read_bytes())
    return found


def _record(data: bytes) -> Record:
    record = Record()
    for text in data.split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the last line of a killed process may be torn
        kind = line["kind"]
        if kind == "pid":
            record.pid, record.started = line["pid"], line["started"]
        elif kind == "manager":
            record.has_manager = True
        elif kind == "failed":
            record.failures.append(line["error"])
        elif kind != "held":
            if kind == "begin":
                record.lines.clear()
            record.lines.append(Line(**{k: v for k, v in line.items() if k in _FIELDS}))
    return record
