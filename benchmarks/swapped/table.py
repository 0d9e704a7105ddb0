"""The table of `benchmarks.swapped`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, row, table


def swapped(lines: list[Line]) -> str:
    """A row per suite; what fails without us is not in it."""
    lines = newest(lines, "suite")
    columns = "suite | passed | failed by design | failed because of checkfreq"
    return table(columns, [row(*_cells(line)) for line in lines], lines)


def _cells(line: Line) -> tuple[str, ...]:
    reasons = "; ".join(f"{count}: {reason}" for reason, count in line["by_design"].items())
    package, version = [*line["versions"].items()][-1]
    name = package if line["suite"] == package else f"{line['suite']} of {package}"
    return f"{name} {version}", str(line["passed"]), reasons or "0", str(len(line["failed"]))


TABLES = {"swapped": Table("swapped", swapped)}
