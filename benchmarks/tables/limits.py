"""The table of `benchmarks.limits`."""

from __future__ import annotations

from benchmarks.tables.common import Line, newest, row, table


def limits(lines: list[Line]) -> str:
    """A row per way, beside the direct write that others are held against."""
    lines = newest(lines, "gib", "arm")
    rows = [
        row(f"{x['gib']:g} GiB", x["arm"], f"{x['gb_per_s']:.2f}", _ratio(x))
        for x in sorted(lines, key=lambda x: (x["gib"], x["arm"]))
    ]
    return table("state | what | GB/s | against raw", rows, lines)


def _ratio(line: Line) -> str:
    return f"{line['throughput_against_raw']:.2f}"
