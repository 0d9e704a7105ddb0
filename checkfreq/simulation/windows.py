"""The worst stretch of a run: what its checkpoints added there beyond the bound. Pure.

Over a whole run an overhead may keep the bound that is far above it for minutes. What a token
bucket has saved up may be spent at any time, so a stretch can exceed the bound by that.
"""

from __future__ import annotations

from collections import deque

#: The length of a stretch.
WINDOW_ITERATIONS = 200


class Windows:
    """All stretches of ``WINDOW_ITERATIONS`` in a row, and shorter ones at the start.

    ``worst_s``: the most by which what was added in one exceeds ``bound`` times its work, or 0.
    """

    def __init__(self, bound: float) -> None:
        self.worst_s = 0.0
        self._bound = bound
        self._sums_s = deque([0.0], maxlen=WINDOW_ITERATIONS + 1)

    def add(self, work_s: float, added_s: float) -> None:
        """An iteration did ``work_s`` of work, to which checkpoints added ``added_s``."""
        self._sums_s.append(self._sums_s[-1] + added_s - self._bound * work_s)
        excess_s = self._sums_s[-1] - self._sums_s[0]
        if excess_s > self.worst_s:
            self.worst_s = excess_s
