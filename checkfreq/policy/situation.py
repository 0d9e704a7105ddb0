"""Tells a machine that is slow from checkpoints that are costly. Pure.

Both make the interval longer in seconds, and ask for different things of the user: one to look at
what else runs there, the other at the disk. Usual is the mean of long before, which follows slowly:
a change that stays becomes usual.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from statistics import median

#: Iterations and checkpoints that the recent median is of, and over which usual follows.
_RECENT = 8, 4
_USUAL = 512, 64
#: Before so many, nothing is usual.
_LEAST = 32, 8
#: Times the usual: more than noise of 15 % makes of a median, less than a second job does.
_SLOW, _COSTLY = 1.25, 1.5


class Situation(Enum):
    """What is different from what was usual in this run; the value is for people."""

    USUAL = "as usual"
    SLOW = "iterations take longer than usual"
    COSTLY = "checkpoints cost more than usual"
    BOTH = "iterations take longer and checkpoints cost more than usual"


class Situations:
    """Of the clean iterations and of the checkpoints of a run."""

    def __init__(self) -> None:
        self._times, self._costs = (
            _Level(recent, usual, least)
            for recent, usual, least in zip(_RECENT, _USUAL, _LEAST, strict=True)
        )

    def add_clean(self, seconds: float) -> None:
        """A clean iteration took so long."""
        self._times.add(seconds)

    def add_cost(self, seconds: float) -> None:
        """A checkpoint cost so much."""
        self._costs.add(seconds)

    def now(self, *, cost_error_s: float) -> Situation:
        """``cost_error_s``: how far noise may move a recent cost, in one standard deviation."""
        is_slow = self._times.exceeds(_SLOW, by=0.0)
        if self._costs.exceeds(_COSTLY, by=cost_error_s):
            return Situation.BOTH if is_slow else Situation.COSTLY
        return Situation.SLOW if is_slow else Situation.USUAL


class _Level:
    """The median of the newest values, and a mean that follows slowly."""

    def __init__(self, recent: int, usual: int, least: int) -> None:
        self._recent: deque[float] = deque(maxlen=recent)
        self._most, self._least = usual, least
        self._mean = 0.0
        self._count = 0  # at most ``usual``

    def add(self, value: float) -> None:
        self._recent.append(value)
        if self._count < self._most:
            self._count += 1
        self._mean += (value - self._mean) / self._count

    def exceeds(self, factor: float, *, by: float) -> bool:
        """Whether the newest are usually more than ``factor`` times the mean, and ``by`` more."""
        if self._count < self._least:
            return False
        now = median(self._recent)
        return now > factor * self._mean and now > self._mean + by
