"""The table of `benchmarks.limits`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest_of_each_place, row, table, told_apart


def limits(lines: list[Line]) -> str:
    """A row per way, beside the direct write that others are held against."""
    lines = newest_of_each_place(lines, "gib", "arm")
    place = told_apart(lines)
    rows = [
        row(f"{x['gib']:g} GiB{place(x)}", x["arm"], _rate(x), _ratio(x))
        for x in sorted(lines, key=lambda x: (x["gib"], place(x), x["arm"]))
    ]
    return table("state | what | GB/s | against raw", rows, lines)


def _rate(line: Line) -> str:
    """With its quartiles, where there are some."""
    if "low" not in line:
        return f"{line['gb_per_s']:.2f}"
    low, rate, high = (each["gb_per_s"] for each in (line["low"], line, line["high"]))
    return f"{rate:.2f} ({low:.2f} to {high:.2f})"


def _ratio(line: Line) -> str:
    return f"{line['throughput_against_raw']:.2f}"


TABLES = {"limits": Table("limits", limits)}
