"""The table of `benchmarks.restore`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest_of_each_place, place_label, row, table
from benchmarks.restore.arms import RAW

_SETTING = ("gib", "tensors", "device", "memory", "arm")


def restore(lines: list[Line]) -> str:
    """A row per state, memory and arm: the raw read first, the others by their time."""
    lines = newest_of_each_place(lines, *_SETTING)
    place = place_label(lines)
    columns = "state | memory | way | restored in | of the raw read | memory beside the state"
    rows = [_row(line, place(line)) for line in sorted(lines, key=_order)]
    return table(columns, rows, lines)


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
