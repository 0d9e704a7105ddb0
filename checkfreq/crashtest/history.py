"""What a life recorded, read back: lines, and the whole state at each of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

State: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Line:
    """One boundary. ``kind``: begin, step (the state was read), passed (it was not), or end."""

    kind: str
    step: int
    digest: str = ""
    key: str = ""
    changed: State = field(default_factory=dict)
    gone: tuple[str, ...] = ()
    batches: tuple[Any, ...] = ()
    fetched: tuple[Any, ...] = ()
    starts: tuple[Any, ...] = ()
    losses: tuple[str, ...] = ()
    seeds: tuple[Any, ...] = ()
    values: State | None = None
    files: Mapping[str, State] | None = None
    untracked: State = field(default_factory=dict)

    @property
    def served(self) -> tuple[Any, ...]:
        """What training was given: by CFIterator, or else by any DataLoader."""
        return self.batches or self.fetched


@dataclass(slots=True)
class Record:
    """The lines of one rank in one life, from its last ``begin`` on."""

    lines: list[Line] = field(default_factory=list)
    has_manager: bool = False
    #: The process, and when it started (`plan.started`).
    pid: int = 0
    started: int = 0
    #: Added to every step, where a script did not know at which it went on.
    shift: int = 0

    @property
    def begin(self) -> Line | None:
        """What it went on from; None if it did not get so far."""
        return self.lines[0] if self.lines else None

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
        """Each line whose state was read, with its step and its whole state."""
        state: dict[str, str] = {}
        for line in self.lines:
            if line.kind == "passed":
                continue
            if line.kind == "begin":
                state = {}
            state = {**state, **line.changed}
            for name in line.gone:
                state.pop(name, None)
            yield line.step + self.shift, line, state

    def at(self, step: int) -> tuple[Line, State] | None:
        """The boundary of a step; of step 0, or where a life went on, its beginning."""
        for number, line, state in self.steps():
            if number == step and line.kind != "end":
                return line, dict(state)
        return None

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
        elif kind != "held":
            if kind == "begin":
                record.lines.clear()
            record.lines.append(_line(line))
    return record


def _line(line: Mapping[str, Any]) -> Line:
    return Line(
        kind=line["kind"],
        step=line["step"],
        digest=line.get("digest", ""),
        key=line.get("key", ""),
        changed=line.get("state", {}),
        gone=tuple(line.get("gone", ())),
        batches=tuple(line["batches"]),
        fetched=tuple(line["fetched"]),
        starts=tuple(line["starts"]),
        losses=tuple(line["losses"]),
        seeds=tuple(line["seeds"]),
        values=line.get("values"),
        files=line.get("files"),
        untracked=line.get("untracked", {}),
    )
