"""The charts of a report, drawn by matplotlib: each a function from the series to a figure.

Colours are roles. In a page they become variables of its style sheet, which has a dark and a light
set; in a PNG they are the light ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from checkfreq.story.facts import number, span, time_spent
from checkfreq.story.report.series import Point, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Role: what stands for it in a figure that becomes part of a page, its light and its dark colour.
ROLES: Mapping[str, tuple[str, str, str]] = {
    "ink": ("#010203", "#1f2328", "#e6e8eb"),
    "grid": ("#010204", "#d8dce1", "#3a4048"),
    "blue": ("#010205", "#1f6fb4", "#6cb2ee"),
    "green": ("#010206", "#237a3d", "#6fcf87"),
    "orange": ("#010207", "#b85c00", "#f0a050"),
    "red": ("#010208", "#b3261e", "#ff8a80"),
    "violet": ("#010209", "#6b4fb3", "#b79df5"),
    "grey": ("#01020a", "#7a828c", "#9aa3ad"),
    "paper": ("#01020b", "#ffffff", "#16191d"),
}
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "checkfreq",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "path.simplify": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
}
_DAY_S = 86_400.0
#: Of an amount of storage, as everywhere else in a report.
_UNITS = (
    *(
        (f"{prefix}iB", 1024.0**power)
        for prefix, power in zip("PTGMK", range(5, 0, -1), strict=True)
    ),
    ("bytes", 1.0),
)
#: Of the ticks on an axis of time.
_STEPS_S = (
    *(1, 2, 5, 10, 15, 30),
    *(60 * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(3600 * hours for hours in (1, 2, 3, 6, 12)),
    *(_DAY_S * days for days in (1, 2, 5, 10, 20, 50, 100, 200, 500)),
)
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


@dataclass(frozen=True, slots=True)
class Style:
    """``width`` in inches. ``for_page``: colours stand for variables of a style sheet."""

    width: float
    for_page: bool

    def __getitem__(self, role: str) -> str:
        marker, light, _ = ROLES[role]
        return marker if self.for_page else light

    @property
    def is_narrow(self) -> bool:
        """For a phone: fewer ticks."""
        return self.width < 5


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: ``name`` of its PNG, title, what it shows, and what draws it.

    ``draw`` returns False where the story has nothing to draw. Height and margins in inches.
    """

    name: str
    title: str
    caption: str
    height: float
    draw: Callable[[Series, Axes, Style], bool]
    left: float = 0.62
    bottom: float = 0.28

    def figure(self, series: Series, style: Style) -> Figure | None:
        """The figure; None if there is nothing to show."""
        own = dict.fromkeys(_INKED, style["ink"])
        with matplotlib.rc_context({**_SETTINGS, **own, "grid.color": style["grid"]}):
            figure = Figure(figsize=(style.width, self.height))
            # Fixed: to find out what labels need takes as long as drawing them.
            left, right = self.left / style.width, 1 - 0.2 / style.width
            bottom, top = self.bottom / self.height, 1 - 0.12 / self.height
            figure.subplots_adjust(left, bottom, right, top)
            axes = figure.add_subplot()
            return figure if self.draw(series, axes, style) else None


def save_settings() -> dict[str, object]:
    """What must also be set while a figure is saved."""
    return dict(_SETTINGS)


def _time_axis(axes: Axes, style: Style) -> None:
    first, last = axes.get_xlim()
    most = 4 if style.is_narrow else 8
    step = next((one for one in _STEPS_S if (last - first) / one <= most), (last - first) / most)
    ticks = [step * count for count in range(math.ceil(first / step), int(last // step) + 1)]
    pattern = "%b %d" if step >= _DAY_S else "%H:%M:%S" if step < 60 else "%H:%M"
    if step < _DAY_S < last - first:
        pattern = f"%d. {pattern}"
    axes.set_xticks(ticks, [_clock(tick, pattern) for tick in ticks])
    axes.grid(True, axis="y", linewidth=0.6)
    axes.set_axisbelow(True)


def _clock(local_s: float, pattern: str) -> str:
    try:
        return time.strftime(pattern, time.gmtime(local_s))
    except (OverflowError, OSError, ValueError):
        return f"{local_s:g}"


def _when(points: list[Point]) -> tuple[list[float], list[float]]:
    return [_local(at_s) for at_s, _ in points], [value for _, value in points]


def _local(unix_s: float) -> float:
    """Seconds of the local clock, so that whole hours and days are multiples."""
    try:
        return unix_s + time.localtime(unix_s).tm_gmtoff
    except (OverflowError, OSError, ValueError):
        return unix_s


def _from_zero(axes: Axes, points: list[Point]) -> None:
    """Zero is shown, and what is highest is not at the edge."""
    highest = max((value for _, value in points if not math.isnan(value)), default=0.0)
    axes.set_ylim(0, 1.1 * highest or 1.0)


def _progress(series: Series, axes: Axes, style: Style) -> bool:
    if series.progress:
        points = _when(series.progress)
        axes.plot(*points, color=style["blue"], linewidth=1.6, label="training")
    if series.commits:
        made = _when(series.commits)
        axes.plot(*made, ".", color=style["green"], markersize=4, label="durable")
    if series.lost:
        lost = _when(series.lost)
        axes.plot(*lost, ":", color=style["red"], linewidth=1.4, label="done again")
    if series.failures:
        failed = _when(series.failures)
        axes.plot(*failed, "x", color=style["red"], markersize=5, label="failed")
    axes.set_ylabel("iteration")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    _time_axis(axes, style)
    if series.progress or series.commits:
        axes.legend(loc="upper left", fontsize="small")
    return bool(series.progress or series.commits)


def _interval(series: Series, axes: Axes, style: Style) -> bool:
    found = series.intervals
    if found:
        axes.step(*_when(found), where="post", color=style["violet"], linewidth=1.6)
        _from_zero(axes, found)
    axes.set_ylabel("iterations")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    _time_axis(axes, style)
    return bool(found)


def _overhead(series: Series, axes: Axes, style: Style) -> bool:
    found = series.overheads
    if found:
        axes.plot(*_when(found), color=style["blue"], linewidth=1.6, label="measured")
        if series.bounds:
            axes.plot(*_when(series.bounds), "--", color=style["orange"], linewidth=1.4,
                      label="bound")  # fmt: skip
        _from_zero(axes, [*found, *series.bounds])
        axes.set_ylabel("added time, %")
        axes.legend(loc="best", fontsize="small")
    _time_axis(axes, style)
    return bool(found)


_LANES = {"training held": "red", "snapshot": "blue", "persist": "violet", "upload": "orange"}


def _timeline(series: Series, axes: Axes, style: Style) -> bool:
    bars, shown = series.bars, series.latest
    if not shown:
        return False
    lanes = [lane for lane in _LANES if any(bar.lane == lane for bar in bars)]
    start_s = shown[0][0].started_s(shown[0][1])
    order = ["iteration", *lanes, "commit"]
    for bar in bars:
        row, color = order.index(bar.lane) - 0.3, style[_LANES[bar.lane]]
        stretch = [(bar.start_s - start_s, bar.length_s)]
        axes.broken_barh(stretch, (row, 0.6), facecolor=color, edgecolor=color, linewidth=0.8)
    starts = [run.started_s(save) - start_s for run, save in shown]
    axes.plot(starts, [0] * len(shown), "|", color=style["ink"], markersize=9)
    ends = [run.durable_s(save) - start_s for run, save in shown]
    axes.plot(ends, [len(order) - 1] * len(shown), "d", color=style["green"], markersize=4.5)
    _number_boundaries(axes, starts, [save.step for _, save in shown], style)
    axes.spines["left"].set_visible(False)  # or it would run through the first number
    axes.set_yticks(range(len(order)), order)
    axes.set_ylim(len(order) - 0.5, -0.9)
    axes.xaxis.set_major_locator(MaxNLocator(4 if style.is_narrow else 9))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: span(value) if value else "0 s"))
    axes.set_xlabel(f"since iteration {number(shown[0][1].step)}")
    return True


def _number_boundaries(axes: Axes, starts: list[float], steps: list[int], style: Style) -> None:
    """Write the iteration above its boundary, where it does not touch the one before."""
    axes.margins(x=0.12 if style.is_narrow else 0.05)
    first, last = axes.get_xlim()
    inches_each = 0.075 * max(len(number(step)) for step in steps)
    least = (last - first) * inches_each / (style.width - 1.22)
    clear_from = -math.inf
    for at_s, step in zip(starts, steps, strict=True):
        if at_s >= clear_from:
            axes.text(at_s, -0.45, number(step), ha="center", va="bottom", fontsize="small")
            clear_from = at_s + least


_SPENT = {
    "training": ("training", "blue"),
    "checkpoints": ("checkpoints", "orange"),
    "lost": ("done again", "red"),
    "down": ("between runs", "grey"),
}


def _spent(series: Series, axes: Axes, style: Style) -> bool:
    spent = time_spent(series.story)
    total_s = sum(spent.values())
    if total_s <= 0:
        return False
    names = list(_SPENT)
    parts = [100 * spent[name] / total_s for name in names]
    axes.barh(range(4), parts, color=[style[_SPENT[name][1]] for name in names], height=0.62)
    for row, (name, part) in enumerate(zip(names, parts, strict=True)):
        inside = part > 60
        text = f"{part:.3g} %, {span(spent[name])}"
        axes.text(part - 1 if inside else part + 1, row, text, va="center",
                  ha="right" if inside else "left", fontsize="small",
                  color=style["paper" if inside else "ink"])  # fmt: skip
    axes.set_yticks(range(4), [_SPENT[name][0] for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the time")
    return True


def _storage(series: Series, axes: Axes, style: Style) -> bool:
    found = [("written", "violet", series.written), ("uploaded", "orange", series.uploaded)]
    most = max((value for _, _, points in found for _, value in points), default=0.0)
    unit = next((unit for unit in _UNITS if most >= 2 * unit[1]), _UNITS[-1])
    for label, role, points in found:
        if points:
            times, values = _when(points)
            amounts = [value / unit[1] for value in values]
            axes.step(times, amounts, where="post", color=style[role], linewidth=1.6, label=label)
    axes.set_ylim(0, 1.1 * most / unit[1] or 1.0)
    axes.set_ylabel(unit[0])
    _time_axis(axes, style)
    if series.written:
        axes.legend(loc="upper left", fontsize="small")
    return bool(series.written)


CHARTS = (
    Chart(
        "progress",
        "How far training is",
        "Each durable checkpoint is a dot. Where iterations were done again, a dotted line leads "
        "from the last known one of a run, over its end, to where the next run went on.",
        2.9,
        _progress,
    ),
    Chart(
        "timeline",
        "The latest checkpoints",
        "From the boundary of an iteration to the commit, of the latest checkpoints. Training "
        "stands still only while it is held.",
        2.5,
        _timeline,
        left=1.02,
        bottom=0.48,
    ),
    Chart(
        "overhead",
        "Overhead",
        "By how much checkpoints have made the run longer so far, as measured; and the bound, if "
        "there is one. Checkpoints that are not periodic come on top of it.",
        2.2,
        _overhead,
    ),
    Chart(
        "interval", "The interval", "As planned from measured costs, or as chosen.", 2.2, _interval
    ),
    Chart(
        "time",
        "Where the time went",
        "Done again: iterations that a killed run had done after its last checkpoint, estimated "
        "from its events.",
        1.9,
        _spent,
        left=1.02,
        bottom=0.48,
    ),
    Chart(
        "storage",
        "Storage written",
        "In all; what was linked instead of written is not counted.",
        2.2,
        _storage,
    ),
)
