"""A limit on the upload rate, kept by pauses before requests. Any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Bandwidth:
    """Delays requests so that their rate stays under a limit on average; None means no limit."""

    def __init__(
        self,
        max_bytes_per_s: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._next_start_s = clock()

    def wait_for(self, num_bytes: int) -> None:
        """Return when ``num_bytes`` more may be sent."""
        if self._max_bytes_per_s is None:
            return
        with self._lock:
            start_s = max(self._clock(), self._next_start_s)
            self._next_start_s = start_s + num_bytes / self._max_bytes_per_s
        # Outside the lock, so that the next thread can take its turn.
        if (left_s := start_s - self._clock()) > 0:
            self._sleep(left_s)
