"""What the tables share: the newest lines of a setting, rows between bars, how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: A result line, as `benchmarks.record.emit` wrote it.
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of one benchmark's lines as Markdown; "" where there is nothing to show."""

    benchmark: str
    build: Callable[[list[Line]], str]


def newest(lines: Sequence[Line], *settings: str) -> list[Line]:
    """The last line of each setting, in the order in which the settings first came."""
    return list({tuple(x.get(name) for name in settings): x for x in lines}.values())


def table(columns: str, rows: Sequence[str], lines: Sequence[Line]) -> str:
    """``columns`` are names between bars; under the rows stands how ``lines`` were measured."""
    if not lines:
        return ""
    rule = "|---" * (columns.count(" | ") + 1) + "|"
    return "\n".join([f"| {columns} |", rule, *rows, "", *_how(lines)])


def row(*cells: object) -> str:
    """Cells between bars."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def introduced(text: str, table: str) -> str:
    """A table with the text that belongs to it; neither without lines."""
    return f"\n{text}\n{table}" if table else ""


def percent(fraction: float | None) -> str:
    """Two decimals; unknown for None."""
    return "unknown" if fraction is None else f"{100 * fraction:.2f} %"


def milliseconds(value: float | None) -> str:
    """One decimal; a dash for None."""
    return "-" if value is None else f"{value:.1f} ms"


def seconds(value: float | None) -> str:
    """Two decimals; a dash for None."""
    return "-" if value is None else f"{value:.2f} s"


def span(values: Sequence[int]) -> str:
    """From the least to the largest, or the one that all are."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _how(lines: Sequence[Line]) -> list[str]:
    said = sorted({f"`{x['command']}`, commit {x['commit']}, {_machine(x)}" for x in lines})
    return [f"{how}  " for how in said] + [""]


def _machine(line: Line) -> str:
    machine, versions = line["machine"], line["versions"]
    device = f", {machine['accelerator']}" if machine["accelerator"] else ""
    return f"{machine['cores']} cores{device}, torch {versions['torch']}"
