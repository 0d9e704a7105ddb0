"""When to retry something that keeps failing: at once, then after pauses that double. Pure."""

from __future__ import annotations

_FIRST_S = 1.0
#: Storage that comes back is used again within five minutes, however long it was away.
_LONGEST_S = 300.0


class Backoff:
    """Counts consecutive failures and says how long to wait before the next attempt.

    There is no pause after the first failure, since most are over by the next attempt. From the
    second on, pauses begin at ``first_s`` and double up to ``longest_s``. Times are in seconds of
    one clock, whichever the caller uses.
    """

    def __init__(self, *, first_s: float = _FIRST_S, longest_s: float = _LONGEST_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._until_s = 0.0
        self.num_in_row = 0

    def failed(self, now_s: float) -> None:
        """Another attempt failed."""
        self.num_in_row += 1
        self._until_s = now_s + self._pause_s()

    def succeeded(self) -> None:
        """An attempt succeeded: the next failure counts as the first again."""
        self.num_in_row = 0

    def left_s(self, now_s: float) -> float:
        """Seconds until the next attempt is allowed; 0.0 if it is allowed now."""
        return max(0.0, self._until_s - now_s) if self.num_in_row else 0.0

    def _pause_s(self) -> float:
        # Doubled in a loop: a power of two would overflow a float after 1024 failures.
        pause_s = 0.0 if self.num_in_row < 2 else self._first_s
        for _ in range(self.num_in_row - 2):
            if pause_s >= self._longest_s:
                break
            pause_s *= 2
        return min(pause_s, self._longest_s)
