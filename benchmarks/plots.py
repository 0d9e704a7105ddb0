"""The plots of the pages, drawn from benchmarks/results/*.jsonl into benchmarks/results/*.svg.

The same lines give the same file, so a test can draw it again and compare.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.goodput import plot as goodput
from benchmarks.interference import plot as interference
from benchmarks.interruptions import plot as interruptions
from benchmarks.lab.plots import Plot, save
from benchmarks.lab.results import RESULTS, lines_of
from benchmarks.scale import plot as scale

#: By file name. Each plot shows the lines of one benchmark.
PLOTS: dict[str, Plot] = {
    "interference": Plot("interference", interference.draw),
    "interruptions": Plot("interruptions", interruptions.draw),
    "goodput": Plot("goodput", goodput.draw),
    "scale": Plot("scale", scale.draw),
}


def draw_all(*, results: Path = RESULTS, out: Path = RESULTS) -> list[Path]:
    """Draw every plot that has lines in ``results``; those without lines have no file."""
    drawn = []
    for name, plot in PLOTS.items():
        path = out / f"{name}.svg"
        figure = plot.draw(lines_of(plot.benchmark, results))
        if figure is None:
            path.unlink(missing_ok=True)
        else:
            save(figure, path)
            drawn.append(path)
    return drawn
