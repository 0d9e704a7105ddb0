"""What the plots share: a figure without a screen, one style, reproducible files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lab.tables import Line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Ours first, then the others in turn.
COLOURS = ("#1f6fb4", "#c0392b", "#2e8b57", "#e08e0b", "#8e44ad", "#7f8c8d", "#16a085", "#5d4037")
_SAME_EVERY_TIME = {"svg.hashsalt": "checkfreq", "svg.fonttype": "none"}


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of one benchmark's lines; ``draw`` returns None if there is nothing to show."""

    benchmark: str
    draw: Callable[[list[Line]], Figure | None]


def panels(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (9.0, 4.5), **options: Any
) -> tuple[Figure, Any]:
    """A figure and its axes, in inches, drawn without a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **options)


def save(figure: Figure, path: Path) -> None:
    """Write an SVG without a date or random names in it."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(_SAME_EVERY_TIME):
        figure.savefig(path, format="svg", metadata={"Date": None})
