"""Table of `benchmarks.simulate`: the policy under simulated costs."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, table


def policy(lines: list[Line]) -> str:
    """A row per scenario of changing costs."""
    lines = newest([x for x in lines if "phases" in x], "arm")
    columns = "scenario | overhead / bound | excess, in checkpoints | interval / the oracle's"
    rows = []
    for x in lines:
        settled = ", ".join(
            f"{phase['planned_steps']:g} / {phase['oracle_steps']}" for phase in x["phases"]
        )
        rows.append(
            f"| {x['arm']} | {100 * x['largest_overhead']:.2f} % / {100 * x['max_overhead']:g} % "
            f"| {max(0.0, x['worst_excess_in_checkpoints']):.2f} | {settled} |"
        )
    return table(columns, rows, lines)


TABLES = {"simulate": Table("simulate", policy)}
