"""Tables of `benchmarks.memory` and `benchmarks.startup`."""

from __future__ import annotations

from benchmarks.tables.common import Line, newest, table


def memory(lines: list[Line]) -> str:
    """Everything that checkpointing takes, against what it may."""
    columns = "state | checkpoints | used | allowed | worker alone | growth"
    lines = newest(lines, "mib")
    rows = [
        f"| {x['mib']:g} MiB × {x['num_slots']} slots | {x['saves']} | {x['total_mib']:.0f} MiB "
        f"| {x['allowed_mib']:.0f} MiB | {x['worker_private_mib']:.0f} MiB "
        f"| {x['trainer_grew_mib'] + x['worker_grew_mib']:.1f} MiB |"
        for x in lines
    ]
    return table(columns, rows, lines)


def startup(lines: list[Line]) -> str:
    """How long processes take to be ready."""
    lines = newest(lines, "arm")
    rows = [f"| {x['arm']} | {x['median_s']:.3f} s | {x['max_s']:.3f} s |" for x in lines]
    return table("what | median | slowest", rows, lines)
