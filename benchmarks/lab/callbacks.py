"""The form of the tables of what our callbacks cost in the loops of other libraries."""

from __future__ import annotations

from benchmarks.lab.tables import Line, table


def costs(loop: str, plain: str, lines: list[Line]) -> str:
    """A row per line; ``plain`` is the field with an iteration of that loop as it is."""
    columns = "loop | an iteration | callback | allowed | loader and boundary | added in all"
    rows = [
        f"| {loop} | {x[plain]:.0f} µs | {x['callback_us']:.0f} µs | {x['allowed_us']:.0f} µs "
        f"| {x['by_hand_us']:.0f} µs | {x['added_us']:.0f} µs |"
        for x in lines
    ]
    return table(columns, rows, lines)
