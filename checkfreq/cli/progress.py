"""A bar on a terminal that shows how many bytes have been read."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bytes_bar(what: str, num_bytes: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """Yield a function that any thread calls with the number of bytes that were read.

    The bar is written to stderr: where that is a terminal and ``rich`` is installed, otherwise
    nowhere. ``num_bytes()``, all bytes there are to read, is only called for a bar.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    try:
        from rich import progress
        from rich.console import Console
    except ModuleNotFoundError:
        yield lambda count: None
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    # Lines that are printed meanwhile come above the bar, unless they go to a file or a pipe.
    with progress.Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    ) as shown:
        task = shown.add_task(what, total=num_bytes())
        yield lambda count: shown.advance(task, count)
