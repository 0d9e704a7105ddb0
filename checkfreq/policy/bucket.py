"""The overhead bound as a token bucket. Pure.

Productive time earns ``rate`` seconds of overhead per second. A periodic checkpoint may start
only if the balance covers what it will probably cost. Its actual cost is then deducted, and the
balance may fall below zero. The total overhead therefore exceeds ``rate`` times the productive
time by at most the highest cost of one checkpoint, or of several that overlap. Three things come
on top: checkpoints that had to be taken (the first, the last, requested ones), costs that are not
known yet (charges.py counts an extreme slowdown in full only when it is seen a third time), and
what noise explains of costs, which is deducted later (instalments.py).
"""

from __future__ import annotations

import math


class TokenBucket:
    """Seconds of overhead that may still be spent."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.balance_s = 0.0
        self._depth_s = math.inf

    def earn(self, productive_s: float) -> None:
        """Training has progressed by ``productive_s``."""
        balance_s = self.balance_s + self.rate * productive_s
        # No call of min() here and in ``spend``: both come at every iteration.
        self.balance_s = balance_s if balance_s < self._depth_s else self._depth_s

    def spend(self, cost_s: float) -> None:
        """Deduct ``cost_s``; a negative cost is a refund."""
        balance_s = self.balance_s - cost_s
        self.balance_s = balance_s if balance_s < self._depth_s else self._depth_s

    def limit(self, depth_s: float) -> None:
        """Cap the balance: a long time without checkpoints must not allow a burst of them."""
        self._depth_s = depth_s
        self.balance_s = min(self.balance_s, depth_s)
