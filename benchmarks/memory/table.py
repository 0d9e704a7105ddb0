"""Table of `benchmarks.memory`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, table


def memory(lines: list[Line]) -> str:
    """The memory that checkpointing takes, against what is allowed."""
    columns = "state | checkpoints | used | allowed | worker alone | growth"
    lines = newest(lines, "mib")
    rows = [
        f"| {x['mib']:g} MiB × {x['num_slots']} slots | {x['saves']} | {x['total_mib']:.0f} MiB "
        f"| {x['allowed_mib']:.0f} MiB | {x['worker_private_mib']:.0f} MiB "
        f"| {x['trainer_grew_mib'] + x['worker_grew_mib']:.1f} MiB |"
        for x in lines
    ]
    return table(columns, rows, lines)


TABLES = {"memory": Table("memory", memory)}
