"""Seconds against the size of the state: ours, and the limits of disk and bus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.lab.plots import COLOURS, panels
from benchmarks.lab.tables import Line, newest_of_each_place, place_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The curves of each panel: field, factor to seconds, name, style.
_PANELS = {
    "checkpoint": (
        ("held_ms", 1e-3, "training held", "-"),
        ("durable_s", 1, "durable after", "-"),
        ("raw_write_s", 1, "raw write", "--"),
        ("bus_s", 1, "copy over the bus", "--"),
    ),
    "restore": (
        ("restore_s", 1, "restore, verified", "-"),
        ("raw_read_s", 1, "raw read", "--"),
        ("raw_fresh_s", 1, "raw read, new memory", "--"),
    ),
}


def draw(lines: list[Line]) -> Figure | None:
    """A row of panels per device, machine and disk."""
    by_place = _by_place(lines)
    if not by_place:
        return None
    figure, axes = panels(
        len(by_place), len(_PANELS), size=(10, 4.2 * len(by_place)), squeeze=False, sharey="row"
    )
    for row, (where, of_place) in zip(axes, sorted(by_place.items()), strict=True):
        for panel, title in zip(row, _PANELS, strict=True):
            _panel(panel, title, of_place)
            panel.set_title(f"{title}, {where}", fontsize="medium")
        row[0].set_ylabel("seconds")
    return figure


def _by_place(lines: list[Line]) -> dict[str, list[Line]]:
    of_sizes = [x for x in lines if x["what"] == "size"]
    of_sizes = newest_of_each_place(of_sizes, "device", "gib")
    measured = sorted((x for x in of_sizes if "why_not" not in x), key=lambda x: x["gib"])
    place = place_label(measured)
    by_place: dict[str, list[Line]] = {}
    for line in measured:
        by_place.setdefault(f"{line['device']}{place(line)}", []).append(line)
    return by_place


def _panel(panel: Any, title: str, lines: list[Line]) -> None:
    sizes = [x["gib"] for x in lines]
    for (name, factor, words, style), colour in zip(_PANELS[title], COLOURS, strict=False):
        low, middle, high = (
            [factor * values[name] for values in each]
            for each in ([x["low"] for x in lines], lines, [x["high"] for x in lines])
        )
        panel.plot(sizes, middle, style, color=colour, label=words, marker=".")
        panel.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("state (GiB)")
    panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
    panel.legend(loc="upper left")
