"""A restore is shown as a bar on a terminal, and as lines in a log."""

from __future__ import annotations

import io

from checkfreq.restore.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_terminal_gets_a_bar_that_ends_full() -> None:
    terminal, clock = Terminal(), Clock()
    progress = Progress("restoring step 3", 40_000_000, stream=terminal, clock=clock)
    clock.now_s += 1.0
    progress.add(10_000_000)
    clock.now_s += 1.0
    progress.add(30_000_000)
    for _ in range(1000):  # a bar is not drawn for every piece
        clock.now_s += 0.001
        progress.add(0)
    progress.finish()
    bars = terminal.getvalue().split("\r")[1:]
    assert bars[0].startswith(
        "[########......................] restoring step 3: 10 of 40 MB (25%)"
    )
    assert len(bars) < 20
    assert bars[-1].startswith(f"[{'#' * 30}] restoring step 3: 40 of 40 MB (100%), 13 MB/s")
    assert bars[-1].endswith("\n")


def test_a_stream_that_is_missing_or_closed_or_goes_away_does_not_fail() -> None:
    for stream in (None, io.StringIO(), Terminal()):
        clock = Clock()
        progress = Progress("restoring", 10, stream=stream, clock=clock)
        if stream is not None:
            stream.close()
        clock.now_s += 1.0
        progress.add(10)
        progress.finish()
