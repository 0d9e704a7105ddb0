"""The table of `benchmarks.node`."""

from __future__ import annotations

from benchmarks.lab.tables import (
    Line,
    Table,
    introduced,
    newest_of_each_place,
    place_label,
    row,
    table,
)

_TEXT = """
Ranks of one machine that restore the same replicated state, begun by all together; the slowest
rank counts. `shared`: each piece is read by one of them and handed to the others, as from 128 MiB
on; `each for itself`: as below that. Medians, with quartiles:
"""


def node(lines: list[Line]) -> str:
    """A row per state, number of ranks and arm."""
    lines = newest_of_each_place(lines, "mib", "ranks", "arm")
    place = place_label(lines)
    columns = "state | ranks | reads | read from the disk | restored in | against | processor time"
    rows = [
        row(
            f"{x['mib']:g} MiB{place(x)}",
            x["ranks"],
            x["arm"],
            f"{x['read_mib']:.0f} MiB",
            f"{x['seconds']:.2f} s ({x['low']:.2f} to {x['high']:.2f})",
            f"{x['against_apart']:.2f}",
            f"{x['cpu_s']:.2f} s",
        )
        for x in sorted(lines, key=lambda x: (x["mib"], x["ranks"], x["arm"]))
    ]
    return introduced(_TEXT, table(columns, rows, lines))


TABLES = {"node": Table("node", node)}
