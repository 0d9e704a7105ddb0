"""The plot of `benchmarks.interference`: interval and overhead against time, both arms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.interference.table import last_runs
from benchmarks.lab.plots import COLOURS, panels
from benchmarks.lab.tables import Line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOUR_OF = {"adaptive": COLOURS[0], "static": COLOURS[1]}
_SHADE = "#f0e6d2"


def draw(lines: list[Line]) -> Figure | None:
    """The interval above, the overhead and its bound below, for both arms of the newest run."""
    runs = [[line for line in run if line.get("trace")] for run in last_runs(lines)]
    traces = next((run for run in reversed(runs) if run), [])
    if not traces:
        return None
    figure, (above, below) = panels(2, 1, size=(9, 6), sharex=True)
    for trace in traces:
        _interval(above, trace)
        _overhead(below, trace)
    bound, width_s = traces[-1]["bound"], traces[-1]["width_s"]
    below.axhline(100 * bound, color="black", linestyle="--", label=f"bound {100 * bound:g} %")
    below.axhline(0, color="grey", linewidth=0.6)
    below.set_ylabel(f"overhead, last {width_s:g} s (%)")
    below.set_xlabel("seconds")
    below.set_xlim(0, max(_end_s(trace) for trace in traces))
    above.set_ylabel("interval (iterations)")
    above.set_ylim(bottom=0)
    above.yaxis.get_major_locator().set_params(integer=True)
    for panel in (above, below):
        _shade(panel, traces[-1])
        panel.legend(loc="best")
    _name_phases(above, traces[-1])
    figure.suptitle("A second load arrives and leaves")
    return figure


def _end_s(trace: Line) -> float:
    return float(trace["phases"][-1][2])


def _interval(panel: Any, trace: Line) -> None:
    at_s, intervals = zip(
        *trace["intervals"], (_end_s(trace), trace["intervals"][-1][1]), strict=True
    )
    panel.step(at_s, intervals, where="post", linewidth=1.8, **_look(trace))


def _overhead(panel: Any, trace: Line) -> None:
    """Without the first points, whose window was not yet full, if there are others."""
    points = [point for point in trace["overheads"] if point[0] >= trace["width_s"]]
    at_s, overheads = zip(*(points or trace["overheads"]), strict=True)
    panel.plot(at_s, [100 * each for each in overheads], linewidth=1.8, **_look(trace))


def _look(trace: Line) -> dict[str, str]:
    return {"color": _COLOUR_OF[trace["arm"]], "label": trace["arm"]}


def _shade(panel: Any, trace: Line) -> None:
    for name, start_s, end_s in trace["phases"]:
        if name == "second load":
            panel.axvspan(start_s, end_s, color=_SHADE, zorder=0)


def _name_phases(panel: Any, trace: Line) -> None:
    place = panel.get_xaxis_transform()
    for name, start_s, end_s in trace["phases"]:
        middle_s = (start_s + end_s) / 2
        panel.text(middle_s, 1.02, name, transform=place, ha="center", va="bottom")
