"""Figures that other benchmarks measured, read from the committed result lines.

The first source that has a line provides a figure, from its newest line (the last in its file),
together with the benchmark, commit and machine it came from. If there is no line, `Missing` says
how to measure the figure; nothing is made up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from benchmarks.lab.results import lines_of
from benchmarks.lab.tables import Line


@dataclass(frozen=True, slots=True)
class Figure:
    """A value in seconds and where it came from, in words."""

    value: float
    origin: str


@dataclass(frozen=True, slots=True)
class Source:
    """A benchmark whose lines have these figures together, and which of its lines count."""

    benchmark: str
    command: str
    where: Callable[[Line], bool]
    figures: Mapping[str, Callable[[Line], float | None]]

    def newest(self, results: Path, *, model: str | None = None) -> Line | None:
        """The last line that has all figures; of ``model``, if given.

        Newer lines that lack one are reported on standard error.
        """
        lines = reversed(lines_of(self.benchmark, results))
        meant = [line for line in lines if self._is_meant(line, model)]
        skipped = list(takewhile(self._missing, meant))
        if skipped:
            print(self._said_of(skipped), file=sys.stderr)
        return next(iter(meant[len(skipped) :]), None)

    def _is_meant(self, line: Line, model: str | None) -> bool:
        return (model is None or line.get("model") == model) and self.where(line)

    def _missing(self, line: Line) -> list[str]:
        return [name for name, read in self.figures.items() if read(line) is None]

    def _said_of(self, skipped: Sequence[Line]) -> str:
        """The newest skipped line, and how many more there are."""
        newest = skipped[0]
        more = f", and {len(skipped) - 1} before it" if len(skipped) > 1 else ""
        return (
            f"{origin_of(newest)}: this newer line is left out{more}, "
            f"without {', '.join(self._missing(newest))} above 0"
        )

    def read(self, line: Line) -> dict[str, Figure]:
        """The figures of a line that has all of them."""
        origin = origin_of(line)
        values = {name: read(line) for name, read in self.figures.items()}
        return {name: Figure(value, origin) for name, value in values.items() if value is not None}


def in_seconds(field: str) -> Callable[[Line], float | None]:
    """Reads ``..._s`` or ``..._ms``; None below 0, as a difference of noisy times can be."""
    unit = 1e-3 if field.endswith("_ms") else 1.0

    def read(line: Line) -> float | None:
        value = line.get(field)
        return None if value is None or value <= 0 else unit * value

    return read


class Missing(Exception):
    """No committed line has these figures; says which benchmarks measure them."""

    def __init__(self, sources: Sequence[Source], model: str | None) -> None:
        names = ", ".join(sources[0].figures)
        of_model = f" of {model}" if model is not None else ""
        ways = " or ".join(
            f"`{each.command} >> benchmarks/results/{each.benchmark}.jsonl`" for each in sources
        )
        options = " ".join(f"--{name.replace('_', '-')}" for name in sources[0].figures)
        super().__init__(
            f"{names}{of_model}: not measured yet, no result line has it. "
            f"Measure it with {ways}, or give {options}"
        )


def measured(
    sources: Sequence[Source], results: Path, *, model: str | None = None
) -> tuple[dict[str, Figure], Line]:
    """The figures and the line they come from; raises Missing."""
    for source in sources:
        line = source.newest(results, model=model)
        if line is not None:
            return source.read(line), line
    raise Missing(sources, model)


def origin_of(line: Line) -> str:
    """``overhead, resnet18, commit 641eed8, 2 cores``."""
    machine = line["machine"]
    cores = f"{machine['cores']} cores"
    what = [line["benchmark"], line.get("model"), f"commit {line['commit']}", cores]
    return ", ".join(part for part in (*what, machine["accelerator"]) if part)
