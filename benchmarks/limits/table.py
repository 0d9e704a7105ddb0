"""The table of `benchmarks.limits`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest_of_each_place, place_label, row, table


def limits(lines: list[Line]) -> str:
    """A row per way, relative to the direct write that other benchmarks compare with."""
    lines = newest_of_each_place(lines, "gib", "arm")
    place = place_label(lines)
    rows = [
        row(f"{x['gib']:g} GiB{place(x)}", x["arm"], _rate(x), _ratio(x))
        for x in sorted(lines, key=lambda x: (x["gib"], place(x), x["arm"]))
    ]
    return table("state | way | GB/s | relative to raw", rows, lines)


def _rate(line: Line) -> str:
    """With its quartiles, where there are some."""
    if "low" not in line:
        return f"{line['gb_per_s']:.2f}"
    low, rate, high = (each["gb_per_s"] for each in (line["low"], line, line["high"]))
    return f"{rate:.2f} ({low:.2f} to {high:.2f})"


def _ratio(line: Line) -> str:
    return f"{line['throughput_against_raw']:.2f}"


TABLES = {"limits": Table("limits", limits)}
