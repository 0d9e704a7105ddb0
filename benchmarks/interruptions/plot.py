"""The plot of `benchmarks.interruptions`: the progress of each arm, and its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.interruptions.restarts import BASE, UNINTERRUPTED
from benchmarks.lab.plots import COLOURS, panels
from benchmarks.lab.tables import Line, newest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOUR_OF = {
    "auto": COLOURS[0],
    "epoch boundary": COLOURS[1],
    "synchronous": COLOURS[3],
    UNINTERRUPTED: COLOURS[2],
    BASE: COLOURS[5],
}


def draw(lines: list[Line]) -> Figure | None:
    """The arms of the newest training: iterations against time, and the loss at each of them.

    An arm without any update is left out.
    """
    arms = {line["arm"]: line for line in newest(_latest(lines), "arm") if line["curve"]}
    if BASE not in arms:
        return None
    figure, (progress, loss) = panels(1, 2, size=(11, 4.5))
    for arm, line in arms.items():
        _progress(progress, arm, line)
    progress.set_xlabel("seconds")
    progress.set_ylabel("iteration")
    progress.set_title(f"A SIGKILL every {arms[BASE]['every_s']:.0f} s")
    _losses(loss, arms)
    for panel in (progress, loss):
        panel.set_xlim(left=0)
        panel.legend(loc="best", fontsize="small")
    return figure


def _latest(lines: list[Line]) -> list[Line]:
    """The lines from the last first base on: one call of the benchmark."""
    bases = [
        place
        for place, line in enumerate(lines)
        if line["arm"] == BASE and line.get("repeat", 1) == 1
    ]
    return lines[bases[-1] :] if bases else []


def _progress(panel: Any, arm: str, line: Line) -> None:
    at_s, steps, _ = zip(*line["curve"], strict=True)
    label = arm if line["finished"] else f"{arm} (given up)"
    panel.plot(at_s, steps, color=_COLOUR_OF[arm], label=label, linewidth=1.4)


def _losses(panel: Any, arms: dict[str, Line]) -> None:
    """The base as a line; on it the interrupted run, whose redone iterations coincide."""
    _, steps, losses = zip(*arms[BASE]["curve"], strict=True)
    panel.plot(steps, losses, color=_COLOUR_OF[BASE], label=BASE, linewidth=3)
    if interrupted := arms.get("auto"):
        _, steps, losses = zip(
            *sorted(interrupted["curve"], key=lambda point: point[1]), strict=True
        )
        same = {True: "equal at every update", False: "not equal", None: "given up"}
        label = f"auto, {interrupted['kills']} SIGKILLs: {same[interrupted['equal']]}"
        panel.plot(steps, losses, color=_COLOUR_OF["auto"], label=label, linewidth=1)
    panel.set_xlabel("iteration")
    panel.set_ylabel("loss")
    panel.set_title("Training loss")
