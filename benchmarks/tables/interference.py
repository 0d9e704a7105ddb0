"""The table of `benchmarks.interference`."""

from __future__ import annotations

from benchmarks.tables.common import Line, newest, percent, table


def interference(lines: list[Line]) -> str:
    """A row per arm and phase."""
    columns = "what | phase | iteration | interval | checkpoints | overhead | its second half"
    lines = newest([x for x in lines if "phase" in x], "arm", "phase")
    rows = [
        f"| {x['arm']} | {x['phase']} | {x['iteration_ms']:.0f} ms | {x['k_start']} → {x['k_end']} "
        f"| {x['checkpoints']} | {percent(x['overhead'])} | {percent(x['overhead_late'])} |"
        for x in lines
    ]
    return table(columns, rows, lines)
