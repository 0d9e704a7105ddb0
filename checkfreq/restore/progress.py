"""How far a restore is: a bar on a terminal, a line every few seconds in a log.

Bytes are counted by the threads that read them. No torch.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from checkfreq.console import say

logger = logging.getLogger(__name__)

#: A bar is drawn at most so often, and a line is logged at most so often, in seconds.
_REDRAW_S = 0.1
_LOG_EVERY_S = 5.0
_BAR_WIDTH = 30


class Progress:
    """Counts bytes up to ``total_bytes``, and shows them on ``stream``; thread-safe."""

    def __init__(
        self,
        what: str,
        total_bytes: int,
        *,
        stream: TextIO | None,
        after_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``after_s``: nothing is shown of what takes less."""
        self._what = what
        self._total_bytes = total_bytes
        self._stream = stream if stream is not None and _is_terminal(stream) else None
        self._clock = clock
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._began_s = self._shown_s = clock()
        self._shows_from_s = self._began_s + after_s
        self._is_shown = after_s == 0.0

    def add(self, num_bytes: int) -> None:
        """So many more bytes have arrived."""
        with self._lock:
            self._num_bytes += num_bytes
            now_s = self._clock()
            if now_s < self._shows_from_s:
                return
            if now_s - self._shown_s < (_LOG_EVERY_S if self._stream is None else _REDRAW_S):
                return
            self._shown_s, self._is_shown = now_s, True
            self._show(now_s)

    def finish(self) -> None:
        """Draw the bar once more, and end its line."""
        with self._lock:
            if self._stream is not None and self._is_shown:
                self._show(self._clock())
                self._write("\n")

    def _show(self, now_s: float) -> None:
        if self._stream is None:
            say(logger, "%s", self._text(now_s))
            return
        filled = round(_BAR_WIDTH * self._share())
        bar = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}]"
        self._write(f"\r{bar} {self._text(now_s)}\x1b[K")

    def _text(self, now_s: float) -> str:
        seconds = max(now_s - self._began_s, 1e-9)
        done, total = self._num_bytes / 1e6, self._total_bytes / 1e6
        rate = done / seconds
        return f"{self._what}: {done:.0f} of {total:.0f} MB ({self._share():.0%}), {rate:.0f} MB/s"

    def _share(self) -> float:
        return min(self._num_bytes / self._total_bytes, 1.0) if self._total_bytes else 1.0

    def _write(self, text: str) -> None:
        assert self._stream is not None
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed
            self._stream.write(text)
            self._stream.flush()


@contextlib.contextmanager
def progress_of(
    what: str, total_bytes: int, *, is_shown: bool, after_s: float = 0.0
) -> Iterator[Callable[[int], object]]:
    """Yields what a reader calls with the number of bytes that arrived; shown if ``is_shown``.

    ``after_s``: nothing is shown of what takes less.
    """
    if not is_shown:
        yield lambda num_bytes: None
        return
    progress = Progress(what, total_bytes, stream=sys.stderr, after_s=after_s)
    try:
        yield progress.add
    finally:
        progress.finish()


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # not a real stream, or a closed one
        return False
