"""Table of `benchmarks.watch`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, percent, row, table


def watch(lines: list[Line]) -> str:
    """What exporters cost a run."""
    lines = newest(lines, "arm")
    rows = [
        row(
            x["arm"],
            f"{x['iteration_ms']:.2f} ms",
            _ratio(x, "ratio", "low", "high"),
            _ratio(x, "processor", "processor_low", "processor_high"),
            percent(x["busy"]),
            f"{x['stalls_ms']:.1f} ms",
        )
        for x in lines
    ]
    columns = "arm | iteration | against none | its processor time | watching | training held"
    return table(columns, rows, lines)


def _ratio(line: Line, name: str, low: str, high: str) -> str:
    if line[low] is None:
        return f"{line[name]:.3f}"
    return f"{line[name]:.3f} ({line[low]:.3f} to {line[high]:.3f})"


TABLES = {"watch": Table("watch", watch)}
