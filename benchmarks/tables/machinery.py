"""Tables of `benchmarks.persist`, `restore`, `stall`, `memory` and `startup`."""

from __future__ import annotations

from benchmarks.tables.common import Line, newest, table


def throughput(lines: list[Line]) -> str:
    """A row per size and arm, the fastest first."""
    columns = "state | what | GB/s | against the raw disk"
    lines = sorted(
        newest(lines, "gib", "arm"), key=lambda x: (x["gib"], -x["throughput_against_raw"])
    )
    rows = [
        f"| {x['gib']:g} GiB | {x['arm']} | {x['gb_per_s']:.2f} "
        f"| {x['throughput_against_raw']:.2f} |"
        for x in lines
    ]
    return table(columns, rows, lines)


def stall(lines: list[Line]) -> str:
    """How long one checkpoint holds training."""
    columns = "device | state | what | held per checkpoint | of an iteration"
    found = newest(lines, "device", "gib", "arm")
    lines = sorted(found, key=lambda x: (x["device"], x["gib"], x["held_ms"]))
    rows = [
        f"| {x['device']} | {x['gib']:g} GiB | {x['arm']} | {x['held_ms']:.1f} ms "
        f"| {100 * x['held_against_iteration']:.2f} % |"
        for x in lines
    ]
    return table(columns, rows, lines)


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
