"""Writes a report: the page, or a PNG file for each chart. Never inside a checkpoint directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from checkfreq.helpers.outputs import require_outside, write_output
from checkfreq.story.figures import Figures
from checkfreq.story.model import Story
from checkfreq.story.report.charts import CHARTS, Style
from checkfreq.story.report.page import page, png
from checkfreq.story.report.series import Series

_PNG_WIDTH = 9.0


def write_page(story: Story, now: Figures, path: Path, *, directory: Path) -> None:
    """Write the page of a checkpoint directory."""
    write_output(path, page(story, now, directory=directory).encode(), what="--out")


def write_pngs(story: Story, folder: Path) -> Iterator[Path]:
    """Write each chart that has something to show; yields the files."""
    require_outside(folder / "a.png", what="--png")
    folder.mkdir(parents=True, exist_ok=True)
    series = Series(story)
    for chart in CHARTS:
        figure = chart.figure(series, Style(_PNG_WIDTH, for_page=False))
        if figure is not None:
            path = folder / f"{chart.name}.png"
            write_output(path, png(figure), what="--png")
            yield path
