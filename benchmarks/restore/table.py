"""The table of `benchmarks.restore`."""

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
from benchmarks.restore.arms import RAW

_TEXT = """
Every restore has a process of its own whose live state is there already. With memory `short`, a
cgroup leaves 0.3 of the state beyond what the process holds. `raw` reads the same files directly
into a few MiB that stay in the processor's cache. Ours verifies every digest, the others nothing.
`from memory`: what the worker of a process that was killed just before still held. `memory beside
the state` is the most that was resident in addition, mapped files included; "killed": it was more
than there is:
"""

_SETTING = ("gib", "tensors", "device", "memory", "arm")


def restore(lines: list[Line]) -> str:
    """A row per state, memory and arm: the raw read first, the others by their time."""
    lines = newest_of_each_place(lines, *_SETTING)
    place = place_label(lines)
    columns = "state | memory | way | restored in | of the raw read | memory beside the state"
    rows = [_row(line, place(line)) for line in sorted(lines, key=_order)]
    return introduced(_TEXT, table(columns, rows, lines))


def _order(line: Line) -> tuple[object, ...]:
    setting = (line["device"], line["gib"], line["memory"])
    return *setting, line["arm"] != RAW, line.get("seconds", float("inf"))


def _row(line: Line, place: str) -> str:
    where = "" if line["device"] == "cpu" else f" on {line['device']}"
    what = (f"{line['gib']:g} GiB{where}{place}", line["memory"], line["arm"])
    if "failed" in line:
        return row(*what, line["failed"], "-", "-")
    seconds = f"{line['seconds']:.2f} s ({line['low']:.2f} to {line['high']:.2f})"
    peak = "-" if line["arm"] == RAW else f"{line['peak_mib']:.0f} MiB"
    return row(*what, seconds, f"{line['against_raw']:.2f}", peak)


TABLES = {"restore": Table("restore", restore)}
