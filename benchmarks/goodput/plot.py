"""Goodput against the number of GPUs, one curve per rule for the interval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.goodput.table import ARMS, last_runs, short
from benchmarks.lab.plots import COLOURS, panels
from benchmarks.lab.tables import Line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OURS = tuple(arm for arm in ARMS if arm.startswith("auto"))
_STYLES = {"auto": "--", "auto mtbf_s": "-", "auto goodput": ":"}


def draw(lines: list[Line]) -> Figure | None:
    """A panel per setting, model and failure rate."""
    runs = last_runs(lines)
    if not runs:
        return None
    figure, axes = panels(1, len(runs), size=(6.5 * len(runs), 4.5), squeeze=False)
    for panel, run in zip(axes[0], runs, strict=True):
        _panel(panel, run)
    axes[0][0].set_ylabel("goodput (%)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def _panel(panel: Any, lines: list[Line]) -> None:
    others = iter(COLOURS[1:])
    for arm, words in ARMS.items():
        found = [(x["gpus"], 100 * (1 - x["goodput"][arm])) for x in lines if arm in x["goodput"]]
        if not found:
            continue
        gpus, lost = zip(*found, strict=True)
        if arm in _OURS:
            panel.plot(gpus, lost, _STYLES[arm], color=COLOURS[0], label=words, marker=".")
        else:  # wide and pale: several are the same as ours
            panel.plot(gpus, lost, color=next(others), label=words, linewidth=4, alpha=0.5)
    panel.set_xscale("log")
    panel.set_xlabel("GPUs")
    panel.set_yscale("log")  # plot the loss: goodput itself would be one line at the top
    panel.invert_yaxis()
    panel.yaxis.set_major_formatter(lambda lost, _: f"{100 - lost:g}")
    panel.set_title(title(lines[-1]), fontsize="medium")


def title(line: Line) -> str:
    """The input figures, in words."""
    costs = f"checkpoint {short(line['cost_s'])}, iteration {short(line['iteration_s'])}"
    notice = f" + {short(line['notice_s'])} notice" if line["notice_s"] else ""
    what = f"{line['model'] or line['setting']}, failures as in {line['rate']}"
    return f"{what}:\n{costs}, restart {short(line['restart_s'])}{notice}"
