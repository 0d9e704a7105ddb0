"""Table of `benchmarks.first`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, table


def first(lines: list[Line]) -> str:
    """How soon a new run is protected."""
    columns = "device | state | slots ready | allowed | first durable after | allowed"
    lines = sorted(newest(lines, "device", "mib"), key=lambda x: (x["device"], x["mib"]))
    rows = [
        f"| {x['device']} | {x['mib']:g} MiB | {x['arena_s_per_gib']:.2f} s/GiB "
        f"| {x['arena_allowed_s_per_gib']:.0f} s/GiB | {x['first_durable_s']:.2f} s "
        f"| {x['allowed_s']:.2f} s |"
        for x in lines
    ]
    return table(columns, rows, lines)


TABLES = {"first": Table("first", first)}
