"""When to try again what keeps failing: at once, then after pauses that double. Pure."""

from __future__ import annotations

_FIRST_S = 1.0
_LONGEST_S = 300.0


class Backoff:
    """Counts failures in a row, and says how long to leave it alone after them.

    The first failure costs no pause: most are over by the next try. From the second on, pauses
    begin at ``first_s`` and double up to ``longest_s``. Times are seconds of any one clock.
    """

    def __init__(self, *, first_s: float = _FIRST_S, longest_s: float = _LONGEST_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._until_s = 0.0
        self.num_in_row = 0

    def failed(self, now_s: float) -> None:
        """It failed once more."""
        self.num_in_row += 1
        self._until_s = now_s + self._pause_s()

    def succeeded(self) -> None:
        """It worked: the next failure is a first one again."""
        self.num_in_row = 0

    def left_s(self, now_s: float) -> float:
        """Seconds until the next try may be made; 0.0 if it may be made now."""
        return max(0.0, self._until_s - now_s) if self.num_in_row else 0.0

    def _pause_s(self) -> float:
        pause_s = 0.0 if self.num_in_row < 2 else self._first_s
        for _ in range(self.num_in_row - 2):
            if pause_s >= self._longest_s:
                break
            pause_s *= 2
        return min(pause_s, self._longest_s)
