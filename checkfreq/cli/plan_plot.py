"""The plot of ``checkfreq plan``: goodput and interval against the size of the cluster."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkfreq.errors import ConfigError
from checkfreq.helpers.outputs import write_output

if TYPE_CHECKING:
    from checkfreq.cli.plan_tables import Document

_COLOURS = ("#1f6fb4", "#c0392b", "#2e8b57", "#e08e0b", "#8e44ad")
_SAME_EVERY_TIME: Any = {"svg.hashsalt": "checkfreq", "svg.fonttype": "none"}


def draw(document: Document, file: str) -> None:
    """Write the plot; ConfigError where matplotlib is missing."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot needs the package matplotlib ({error}): pip install 'checkfreq[report]'"
        ) from None
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    sizes: list[int] = []
    for index, (name, plans) in enumerate(document.clusters.items()):
        style: Any = {"color": _COLOURS[index % len(_COLOURS)], "marker": "o", "markersize": 4}
        sizes = [plan.num_gpus for plan in plans]
        left.plot(sizes, [100 * plan.goodput for plan in plans], label=name, **style)
        right.plot(sizes, [plan.interval_s for plan in plans], label=name, **style)
        losses = [plan.expected_loss_s for plan in plans]
        right.plot(sizes, losses, linestyle=":", color=style["color"])
    left.set_title("time that ends up as progress (%)")
    right.set_title("interval (solid) and loss of a failure (dotted), s")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("GPUs")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    is_svg = file.endswith(".svg")
    with rc_context(_SAME_EVERY_TIME):
        form, metadata = ("svg", {"Date": None}) if is_svg else ("png", {})
        figure.savefig(buffer := io.BytesIO(), format=form, dpi=150, metadata=metadata)
    write_output(Path(file), buffer.getvalue(), what="--plot")
