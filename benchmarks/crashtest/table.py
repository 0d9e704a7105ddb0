"""Table of `benchmarks.crashtest`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, row, seconds, table


def crashtest(lines: list[Line]) -> str:
    """How long verdicts take."""
    lines = newest(lines, "arm")
    rows = [
        row(x["arm"], seconds(x["script_s"]), x["kills"], _verdict(x), f"{x['seconds']:.0f} s")
        for x in lines
    ]
    return table("script | it alone | kills | verdict | after", rows, lines)


def _verdict(line: Line) -> str:
    return f"{line['outcome']}: {line['cause']}" if line["cause"] else str(line["outcome"])


TABLES = {"crashtest": Table("crashtest", crashtest)}
