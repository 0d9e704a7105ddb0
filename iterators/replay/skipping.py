"""Progress of the batches that are skipped on the way to a place: a bar, and the time it took.

The bar needs tqdm; without it there is only the log. Training process only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any


class Skipping:
    """Progress through ``total`` batches. ``clock`` returns seconds."""

    def __init__(self, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = self.left = total
        self._clock, self._began = clock, clock()
        self._bar = _bar(total) if total else None

    def advance(self, count: int) -> None:
        """``count`` more batches were skipped."""
        self.left -= count
        if self._bar is not None:
            self._bar.update(count)

    def close(self) -> float:
        """Remove the bar. Returns the seconds since the start."""
        if self._bar is not None:
            self._bar.close()
        return self._clock() - self._began


def _bar(total: int) -> Any:
    try:
        tqdm = import_module("tqdm").tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc="skipping batches", unit="batch", leave=False)
