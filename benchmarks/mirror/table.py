"""Tables of `benchmarks.mirror`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, table


def uploads(lines: list[Line]) -> str:
    """The rate of the mirror, beside that of its client alone."""
    lines = newest([x for x in lines if x["arm"] == "upload"], "service", "mib")
    rows = [
        f"| {x['service']} | {x['mib']:g} MiB | {x['mirror_mib_per_s']:.0f} MiB/s "
        f"| {x['client_mib_per_s']:.0f} MiB/s "
        f"| {x['ratio']:.2f} ({x['low']['ratio']:.2f} to {x['high']['ratio']:.2f}) |"
        for x in lines
    ]
    return table("service | checkpoint | mirror | client alone | ratio", rows, lines)


def training(lines: list[Line]) -> str:
    """What an upload adds to the iterations beside it."""
    lines = newest([x for x in lines if x["arm"] == "training"], "service", "mib")
    rows = [
        f"| {x['service']} | {x['mib']:g} MiB | {x['iteration_ms']:.1f} ms "
        f"| {100 * x['added']:.0f} % ({100 * x['low']['added']:.0f} to "
        f"{100 * x['high']['added']:.0f}) |"
        for x in lines
    ]
    return table("service | checkpoint | iteration | longer during an upload", rows, lines)


TABLES = {"mirror": Table("mirror", uploads), "mirror_training": Table("mirror", training)}
