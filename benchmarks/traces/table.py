"""Table of `benchmarks.traces`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, table


def traces(lines: list[Line]) -> str:
    """A row per recorded run."""
    columns = (
        "run | load before | others' cores | iteration | checkpoint | ideal interval | recorded "
        "| AUTO replayed | of ideal | overhead | worst of 200"
    )
    lines = newest(lines, "arm")
    rows = [
        f"| {x['scene']} | {x['load']} | {x['others'] or '–'} "
        f"| {x['iteration_ms']:.3g} ms | {x['cost_ms']:.3g} ms "
        f"| {_steps(x['ideal'])} | {_steps(x['recorded']['interval'])} "
        f"| {_steps(x['auto']['interval'])} | {_times(x['auto']['over_ideal'])} "
        f"| {100 * x['auto']['overhead']:.2f} % | {100 * x['auto']['worst']:.2f} % |"
        for x in lines
    ]
    return table(columns, rows, lines)


def _steps(steps: float | None) -> str:
    return "–" if steps is None else f"{steps:g}"


def _times(factor: float | None) -> str:
    return "–" if factor is None else f"{factor:.2f}"


TABLES = {"traces": Table("traces", traces)}
