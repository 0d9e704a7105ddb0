"""Table of `benchmarks.decision`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, table


def decision(lines: list[Line]) -> str:
    """What an iteration costs in which no checkpoint is due."""
    columns = "per iteration | slowest | allowed | iterations | memory growth"
    lines = newest(lines, "arm")
    rows = [
        f"| {x['added_us']:.1f} µs | {x['added_us_worst']:.1f} µs | {x['allowed_us']:.0f} µs "
        f"| {x['long']:,} | {x['python_grew_bytes'] / 1024:.1f} KiB in Python, "
        f"{x['process_grew_bytes'] / 1024:.0f} KiB in all |"
        for x in lines
    ]
    return table(columns, rows, lines)


TABLES = {"decision": Table("decision", decision)}
