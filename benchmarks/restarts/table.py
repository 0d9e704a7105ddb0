"""The table of `benchmarks.restarts`."""

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
from benchmarks.restarts.parts import PARTS

_TEXT = """
`baseline` is checkfreq before restores were streamed; `disk` restores from there, `memory` from the
worker of the killed process; `standby` runs under `checkfreq run --standby`, which keeps a process
with PyTorch imported, and `both` does both. At the end, how long the first checkpoint of the new
process holds training, and the later ones:
"""

#: What a row shows of the parts: those with one name are added up.
_COLUMNS = {
    "interpreter": ("interpreter",),
    "imports": ("import torch", "import checkfreq", "import iterators"),
    "model, loader": ("model and loader",),
    "manager, restore": ("manager", "restore"),
    "first batch": ("first batch",),
    "first update": ("first update",),
}
assert [part for parts in _COLUMNS.values() for part in parts] == list(PARTS)


def restarts(lines: list[Line]) -> str:
    """A row per state and arm, with the parts of the whole."""
    lines = newest_of_each_place(lines, "mib", "workers", "arm")
    place = place_label(lines)
    columns = (
        "state | arm | back in training after | of the baseline "
        f"| {' | '.join(_COLUMNS)} | first checkpoint holds | later ones"
    )
    rows = [_row(line, place(line)) for line in sorted(lines, key=lambda x: x["mib"])]
    return introduced(_TEXT, table(columns, rows, lines))


def _row(line: Line, place: str) -> str:
    ratio = line.get("against_baseline")
    parts = [sum(line["parts"][part] for part in parts) for parts in _COLUMNS.values()]
    return row(
        f"{line['mib']:g} MiB{place}",
        line["arm"],
        f"{line['seconds']:.2f} s ({line['low']:.2f} to {line['high']:.2f})",
        "-" if ratio is None else f"{ratio:.2f}",
        *(f"{seconds:.2f} s" for seconds in parts),
        *(_held(line, name) for name in ("first_held_ms", "later_held_ms")),
    )


def _held(line: Line, name: str) -> str:
    return f"{line[name]:.1f} ms" if name in line else "-"


TABLES = {"restarts": Table("restarts", restarts)}
