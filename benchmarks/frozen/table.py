"""Table of `benchmarks.frozen`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, table

_ARMS = ("trained part alone", "with the frozen base", "with the frozen base, each written")


def frozen(lines: list[Line]) -> str:
    """Bytes and seconds of each checkpoint after the first, beside those of the trained part."""
    columns = "frozen | trained | checkpoint | written | durable after | bytes, ratio | time, ratio"
    lines = newest(lines, "frozen_mib", "trained_mib", "arm")
    lines = sorted(lines, key=lambda x: (x["frozen_mib"], _ARMS.index(x["arm"])))
    rows = [
        f"| {x['frozen_mib']:g} MiB | {x['trained_mib']:g} MiB | {x['arm']} "
        f"| {x['written_mib']:.1f} MiB | {x['durable_s'] * 1e3:.0f} ms "
        f"| {x['bytes_ratio']:.2f} | {x['time_ratio']:.2f} |"
        for x in lines
    ]
    return table(columns, rows, lines)


TABLES = {"frozen": Table("frozen", frozen)}
