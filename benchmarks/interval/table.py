"""Table of `benchmarks.interval`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, table


def interval(lines: list[Line]) -> str:
    """How close AUTO's interval comes to the ideal one, by load: median (90th percentile)."""
    columns = (
        "load | compared with | interval over ideal | in iterations 20 to 300 | longest plan | "
        "overhead over bound | above it by a tenth | first checkpoint"
    )
    lines = newest(lines, "load", "arm")
    rows = [
        f"| {x['load']} | {x['arm']} | {_two(x['interval_over_ideal'])} "
        f"| {_two(x['early_over_ideal'])} | {_two(x['longest_plan_over_ideal'])} "
        f"| {_two(x['overhead_over_bound'])} | {100 * x['part_above_bound']:.1f} % of {x['runs']} "
        f"| {x['first_step'][0]:.0f} |"
        for x in lines
    ]
    return table(columns, rows, lines)


def _two(values: list[float | None]) -> str:
    middle, high = ("none" if value is None else f"{value:.2f}" for value in values)
    return f"{middle} ({high})"


TABLES = {"interval": Table("interval", interval)}
