"""The picture of `benchmarks.interference`: interval and overhead against time, both arms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.interference import Trace

_COLOURS = {"static": "#c0392b", "adaptive": "#1f6fb4"}
_SHADE = "#f0e6d2"


def draw(traces: Sequence[Trace], path: Path, *, bound: float, width_s: float) -> None:
    """Write a PNG: the interval above, the overhead with its bound below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), layout="constrained"
    )
    for trace in traces:
        colour, end_s = _COLOURS[trace.arm], trace.phases[-1].end_s
        at_s, intervals = zip(*trace.intervals, (end_s, trace.intervals[-1][1]), strict=True)
        above.step(at_s, intervals, where="post", color=colour, label=trace.arm, linewidth=1.8)
        points = trace.overhead(width_s=width_s)
        points = [point for point in points if point[0] >= width_s] or points
        at_s, overheads = zip(*points, strict=True)
        percent = [100 * each for each in overheads]
        below.plot(at_s, percent, color=colour, label=trace.arm, linewidth=1.8)
    below.axhline(100 * bound, color="black", linestyle="--", label=f"bound {100 * bound:g} %")
    above.set_ylabel("interval (iterations)")
    above.set_ylim(bottom=0)
    above.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    below.set_ylabel(f"overhead, last {width_s:g} s (%)")
    below.axhline(0, color="grey", linewidth=0.6)
    below.set_xlabel("seconds")
    below.set_xlim(0, max(trace.phases[-1].end_s for trace in traces))
    _shade(above, below, traces[-1])
    above.legend(loc="best")
    below.legend(loc="best")
    figure.suptitle("A second load arrives and leaves")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _shade(above: Any, below: Any, trace: Trace) -> None:
    for phase in trace.phases:
        if phase.name == "second load":
            for panel in (above, below):
                panel.axvspan(phase.start_s, phase.end_s, color=_SHADE, zorder=0)
        middle_s = (phase.start_s + phase.end_s) / 2
        place = above.get_xaxis_transform()
        above.text(middle_s, 1.02, phase.name, transform=place, ha="center", va="bottom")
