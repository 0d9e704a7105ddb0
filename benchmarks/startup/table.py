"""Table of `benchmarks.startup`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, table


def startup(lines: list[Line]) -> str:
    """How long processes take to start."""
    lines = newest(lines, "arm")
    rows = [f"| {x['arm']} | {x['median_s']:.3f} s | {x['max_s']:.3f} s |" for x in lines]
    return table("process | median | slowest", rows, lines)


TABLES = {"startup": Table("startup", startup)}
