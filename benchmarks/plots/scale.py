"""Seconds against the size of the state: ours, and what disk and bus give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.plots.common import COLOURS, panels
from benchmarks.tables.common import Line, newest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Of each panel: field, factor to seconds, name, style.
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
    """A row of panels per device."""
    lines = newest([x for x in lines if x["what"] == "size"], "device", "gib")
    lines = sorted((x for x in lines if "why_not" not in x), key=lambda x: (x["device"], x["gib"]))
    devices = sorted({x["device"] for x in lines})
    if not devices:
        return None
    figure, axes = panels(
        len(devices), len(_PANELS), size=(10, 4.2 * len(devices)), squeeze=False, sharey="row"
    )
    for row, device in zip(axes, devices, strict=True):
        of_device = [x for x in lines if x["device"] == device]
        for panel, title in zip(row, _PANELS, strict=True):
            _panel(panel, title, of_device)
            panel.set_title(f"{title}, {device}", fontsize="medium")
        row[0].set_ylabel("seconds")
    return figure


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
