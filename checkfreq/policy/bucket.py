"""The overhead bound as a token bucket. Pure.

Productive time earns ``rate`` seconds of overhead per second. A periodic checkpoint may start
only if the balance covers what it will probably cost; what it did cost is taken off, and the
balance may fall below zero. So the overhead so far never exceeds ``rate`` times the productive
time by more than the largest cost of one checkpoint (of those that overlap), as far as costs are
known (charges.py: slowdowns far out of line are believed when they come the third time);
checkpoints that had to be taken (the first, the last, those asked for) come on top.
"""

from __future__ import annotations


class TokenBucket:
    """Seconds of overhead that may still be spent."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.balance_s = 0.0
        self._depth_s: float | None = None

    def earn(self, productive_s: float) -> None:
        """Training went on for so long."""
        self.balance_s += self.rate * productive_s
        self._clamp()

    def spend(self, cost_s: float) -> None:
        """A checkpoint cost so much (less than nothing: give back)."""
        self.balance_s -= cost_s
        self._clamp()

    def limit(self, depth_s: float) -> None:
        """Save up no more than this, so that a quiet stretch does not license a burst."""
        self._depth_s = depth_s
        self._clamp()

    def _clamp(self) -> None:
        if self._depth_s is not None:
            self.balance_s = min(self.balance_s, self._depth_s)
