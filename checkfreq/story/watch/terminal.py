"""The figures on a terminal: a live view by rich, or plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from checkfreq.errors import printable
from checkfreq.story.figures import Figures
from checkfreq.story.watch.lines import BAD, GOOD, WARN, clock, rows

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.panel import Panel
    from rich.text import Text

_STYLES = {GOOD: "green", WARN: "yellow", BAD: "bold red"}
_BAR = 24
#: In a narrower window there is no room for columns.
_LEAST_WIDTH = 60


def plain(now: Figures, *, name: str) -> str:
    """The figures as lines of text."""
    found = rows(now)
    width = max(len(title) for title, _, _ in found)
    lines = [f"{title.ljust(width)}  {text}" for title, text, _ in found]
    return "\n".join([f"{printable(name)}  {clock(now)}", *lines])


def fitted(now: Figures, *, name: str, console: Console) -> RenderableType:
    """The figures in the window: all rows, or as many of the first as there is room for."""
    framed = panel(now, name=name)
    if console.width >= _LEAST_WIDTH and len(console.render_lines(framed)) <= console.height:
        return framed
    for num_rows in range(len(rows(now)), 0, -1):
        view = _tight(now, num_rows, name=name)
        if len(console.render_lines(view)) <= console.height:
            return view
    return _tight(now, 0, name=name)


def _tight(now: Figures, num_rows: int, *, name: str) -> Text:
    """The first rows, without a frame and without columns."""
    from rich.text import Text

    found = rows(now)
    left = len(found) - num_rows
    view = Text(f"{printable(name)}  {clock(now)}", overflow="fold")
    for title, text, kind in found[:num_rows]:
        view.append(f"\n{title}: ", style="dim").append(text, style=_STYLES.get(kind, ""))
    if left:
        view.append(f"\n{left} more in a larger window", style="dim")
    return view


def panel(now: Figures, *, name: str) -> Panel:
    """The figures for rich, in a frame."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for title, text, kind in rows(now):
        cell = Text(text, style=_STYLES.get(kind, ""))
        if title == "overhead" and now.used_of_bound is not None:
            cell.append(f"\n{_bar(now.used_of_bound)}")
        table.add_row(title, cell)
    return Panel(
        table, title=Text(printable(name)), subtitle=clock(now), border_style="dim", padding=(1, 2)
    )


def _bar(used: float) -> str:
    full = max(0, min(_BAR, round(used * _BAR)))
    return "\u2588" * full + "\u2591" * (_BAR - full)


def show_live(look: Callable[[], Figures], *, name: str, every_s: float) -> None:
    """Show the figures until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(
        fitted(look(), name=name, console=console), console=console, auto_refresh=False
    ) as live:
        while True:
            time.sleep(every_s)
            live.update(fitted(look(), name=name, console=console), refresh=True)


def print_often(look: Callable[[], Figures], *, name: str, every_s: float) -> None:
    """Print the figures again and again, for a log or where rich is missing."""
    while True:
        print(plain(look(), name=name), end="\n\n", flush=True)
        time.sleep(every_s)
