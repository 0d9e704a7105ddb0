"""Table of `benchmarks.report`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, row, seconds, table


def report(lines: list[Line]) -> str:
    """How long a report takes."""
    lines = newest(lines, "arm", "events")
    rows = [
        row(
            f"{x['events']:,}",
            f"{x['runs']:,}",
            seconds(x["median_s"]),
            seconds(x["max_s"]),
            f"{x['page_kib']} KiB",
        )
        for x in lines
    ]
    return table("events | runs | median | slowest | page", rows, lines)


TABLES = {"report": Table("report", report)}
