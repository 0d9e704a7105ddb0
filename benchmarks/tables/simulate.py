"""Tables of `benchmarks.simulate`: the policy on paper, and goodput by size."""

from __future__ import annotations

from benchmarks.tables.common import Line, newest, percent, row, table


def policy(lines: list[Line]) -> str:
    """A row per scenario of costs that change."""
    lines = newest([x for x in lines if "phases" in x], "arm")
    columns = "on paper | overhead / bound | above it, in checkpoints | interval / the oracle's"
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


def goodput(lines: list[Line]) -> str:
    """A row per number of GPUs, a column per arm."""
    lines = newest([x for x in lines if "mtbf_s" in x], "arm")
    arms = list(lines[0]["goodput"]) if lines else []
    columns = f"goodput | {' | '.join(arms)}"
    rows = [row(x["arm"], *(percent(x["goodput"][arm]) for arm in arms)) for x in lines]
    return table(columns, rows, lines)
