"""The clean iterations around a checkpoint, which its own are compared with. Pure.

A mean over many clean iterations says little about the minute in which a checkpoint was taken: a
second job that comes and goes, a hot processor, a file system that is busy would all be charged to
it. What lasts longer than a few iterations is in its neighbours too, before and after, and cancels
in the difference. Over many such pairs each clean iteration counts about as often as in a mean of
all, so nothing is lost where noise is independent.

Matched pairs with a comparison on both sides in time are the interrupted time series of D. T.
Campbell and J. C. Stanley, Experimental and Quasi-Experimental Designs for Research, 1963.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

#: Iterations on each side that count. More would average out more of the noise of one pair, and
#: less of a change that lasts a while.
_EACH_SIDE = 8
#: So many after the checkpoint outweigh twice as many before it: a level that changed meanwhile is
#: then half in the comparison, as it is on average in the checkpoint.
AFTER = _EACH_SIDE // 2
_KEPT = 64


@dataclass(frozen=True, slots=True)
class Level:
    """How long clean iterations took around a checkpoint, in seconds.

    step_s: by how much longer after it than before, 0 if only one side is known. count: how many
    iterations there are on both sides; share: the sum of one part each, before and after.
    """

    mean_s: float
    step_s: float
    count: int
    share: float

    def noise_s(self, num: float, *, one_s: float, sum_s: float) -> float:
        """Standard deviation of the difference to ``num`` iterations, if there is no other cause.

        ``one_s``, ``sum_s``: of one iteration, and of the sum of so many in a row. A step beyond
        what chance explains may have happened anywhere in between.
        """
        by_chance = 2 * one_s * one_s * self.share
        step = max(0.0, self.step_s * self.step_s - by_chance)
        return math.sqrt(sum_s * sum_s * (1 + num / self.count) + num * num * step / 12)

    def weight(self, num: float, *, noise_s: float, sum_s: float) -> float:
        """How much that difference tells, beside one to a level that is known exactly: 0 to 1.

        ``noise_s``: of the difference. While no spread is known (0), what their numbers tell: ten
        iterations less ten times the only one before them tell next to nothing.
        """
        if noise_s:
            return (sum_s / noise_s) ** 2
        return 1 / (1 + num / self.count)


class Neighbours:
    """The newest clean iterations."""

    def __init__(self) -> None:
        self._starts_s: deque[float] = deque(maxlen=_KEPT)
        self._times_s: deque[float] = deque(maxlen=_KEPT)

    def add(self, start_s: float, seconds: float) -> None:
        """Take in a clean iteration that began at ``start_s``; they come in order."""
        self._starts_s.append(start_s)
        self._times_s.append(seconds)

    def around(self, at_s: float) -> Level | None:
        """Around a checkpoint that began at ``at_s``; None before the first clean iteration."""
        split = bisect_left(self._starts_s, at_s)
        before = list(islice(self._times_s, max(0, split - _EACH_SIDE), split))
        after = list(islice(self._times_s, split, split + _EACH_SIDE))
        if not before or not after:
            known = before or after
            return Level(fmean(known), 0.0, len(known), 0.0) if known else None
        early_s, late_s = fmean(before), fmean(after)
        is_balanced = 2 * len(after) >= len(before)
        return Level(
            mean_s=(early_s + late_s) / 2 if is_balanced else fmean(before + after),
            step_s=late_s - early_s,
            count=len(before) + len(after),
            share=1 / len(before) + 1 / len(after),
        )
