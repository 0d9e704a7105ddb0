"""What the tables share: choosing lines, formatting rows, and stating how they were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: A result line, as `benchmarks.lab.record.emit` wrote it.
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of one benchmark's lines as Markdown; "" if there is nothing to show."""

    benchmark: str
    build: Callable[[list[Line]], str]


def tables_of(lines: Iterable[Line], tables: Mapping[str, Table]) -> Iterator[str]:
    """The tables of lines that were just measured, as Markdown."""
    by_benchmark: dict[str, list[Line]] = {}
    for line in lines:
        by_benchmark.setdefault(line["benchmark"], []).append(line)
    for table in tables.values():
        if text := table.build(by_benchmark.get(table.benchmark, [])):
            yield text


def newest(lines: Sequence[Line], *settings: str) -> list[Line]:
    """The last line of each setting, in the order in which the settings first appeared."""
    return list({tuple(x.get(name) for name in settings): x for x in lines}.values())


def newest_of_each_place(lines: Sequence[Line], *settings: str) -> list[Line]:
    """The last line of each setting on each machine and disk: different ones coexist."""
    by_setting = {(*(x.get(name) for name in settings), *_place(x).values()): x for x in lines}
    return list(by_setting.values())


def place_label(lines: Sequence[Line]) -> Callable[[Line], str]:
    """Returns a function for row labels: the parts of a line's machine and disk that differ."""
    places = [_place(x) for x in lines]
    names = [name for name in _PLACE if len({place[name] for place in places}) > 1]
    return lambda line: "".join(f", {_place(line)[name] or f'no {name}'}" for name in names)


def table(columns: str, rows: Sequence[str], lines: Sequence[Line]) -> str:
    """``columns`` are names between bars; below the rows, how ``lines`` were measured."""
    if not lines:
        return ""
    rule = "|---" * (columns.count(" | ") + 1) + "|"
    return "\n".join([f"| {columns} |", rule, *rows, "", *_how(lines)])


def row(*cells: object) -> str:
    """Cells between bars."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def introduced(text: str, table: str) -> str:
    """A table with its introduction; "" without lines."""
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
    """The range of the values, or the only one."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _how(lines: Sequence[Line]) -> list[str]:
    said = sorted({f"`{x['command']}`, commit {x['commit']}, {_machine(x)}" for x in lines})
    return [f"{how}  " for how in said] + [""]


def _machine(line: Line) -> str:
    place = _place(line)
    torch = f"torch {line['versions']['torch']}"
    parts = (place["cores"], place["accelerator"], torch, place["storage"])
    return ", ".join(part for part in parts if part)


def _place(line: Line) -> dict[str, str | None]:
    """The machine and disk of a line, in words; None for unknown or absent parts."""
    machine = line["machine"]
    cores = f"{machine['cores']} cores"
    values = (machine.get("cpu"), cores, machine["accelerator"], line.get("storage"))
    return dict(zip(_PLACE, values, strict=True))


_PLACE = ("CPU model", "cores", "accelerator", "storage")
