"""What a checkpoint adds to the training time, from those so far, with an honest error. Pure.

Noise of the iterations is in every cost, so many are kept: the error of their mean falls with their
number. When they change, the old ones are dropped: at once if the newest are all outside of what
was, and when the mean of the newest differs by more than chance explains (a test for a change at
one of a few places, after E. S. Page, Continuous Inspection Schemes, Biometrika 41, 1954).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from checkfreq.policy.estimates import OUTLIER, Estimate, inflation, trimmed

#: Costs that are kept. Noise of 15 % makes those of short checkpoints vary by three times their
#: mean; it takes hundreds to tell that to a tenth.
WINDOW = 1024
#: Computed anew when so large a part of the costs is new.
_RENEWED = 1 / 16
#: A change of level: the newest four are all above, or all below, everything before.
_RECENT = 4
#: Or the mean of so many newest ones differs by so many standard errors.
_NEWEST = (8, 32, 128, 512)
_CERTAIN = 3.5
_TRIM = 0.1
#: Fewer batches tell nothing about their variance.
_LEAST_BATCHES = 4


@dataclass(frozen=True, slots=True)
class _Cost:
    seconds: float
    weight: float
    num_clean: int  # clean iterations of the run until then


class CheckpointCost:
    """o: a trimmed and weighted mean of the last ``window`` costs.

    Among few values an extreme one counts as ``OUTLIER`` medians. This is what plans use; the
    budget is charged with the full cost.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._costs: deque[_Cost] = deque(maxlen=window)
        self._low_s, self._high_s = math.inf, -math.inf  # of all but the newest
        self._value: Estimate | None = None
        self._num_new = 0

    def __len__(self) -> int:
        return len(self._costs)

    def add(self, seconds: float, *, weight: float = 1.0, num_clean: int = 0) -> None:
        """Take in one checkpoint's cost, which noise may make negative.

        ``weight``: how much it tells. ``num_clean``: clean iterations of the run so far.
        """
        if len(self._costs) >= _RECENT:
            older = self._costs[-_RECENT].seconds
            self._low_s, self._high_s = min(self._low_s, older), max(self._high_s, older)
        self._costs.append(_Cost(seconds, weight, num_clean))
        self._num_new += 1
        recent = [self._costs[-i].seconds for i in range(1, min(_RECENT, len(self._costs)) + 1)]
        is_other = min(recent) > self._high_s or max(recent) < self._low_s
        if is_other and len(self._costs) >= 2 * _RECENT:
            self._keep(_RECENT)

    def clear(self) -> None:
        """Forget everything: snapshots will be taken in a different place."""
        self._keep(0)
        self._value = None

    def num_compared(self, num_clean: int) -> int:
        """Clean iterations since the oldest of the costs; ``num_clean``: of the run so far."""
        return num_clean - self._costs[0].num_clean if self._costs else 0

    def value(self) -> Estimate | None:
        """None before the first."""
        if self._costs and (self._value is None or self._num_new >= _RENEWED * len(self._costs)):
            self._follow_drift()
            self._value = self._estimate()
            self._num_new = 0
        return self._value

    def _estimate(self) -> Estimate:
        limit = OUTLIER * max(0.0, median(cost.seconds for cost in self._costs))
        seconds = [min(c.seconds, limit) if limit else c.seconds for c in self._costs]
        pairs = list(zip(seconds, (cost.weight for cost in self._costs), strict=True))
        kept = trimmed(sorted(pairs), _TRIM)
        mean = sum(s * weight for s, weight in kept) / sum(weight for _, weight in kept)
        low, high = kept[0][0], kept[-1][0]
        # That of a trimmed mean: J. W. Tukey and D. H. McLaughlin, Sankhya A 25, 1963.
        error = _error([(min(max(s, low), high), weight) for s, weight in pairs], mean)
        error *= len(pairs) / len(kept)
        # The doubt: the spread of a few values says little, and a single one has none.
        return Estimate(max(0.0, mean), error, 0.5 * max(0.0, mean) / len(kept))

    def _follow_drift(self) -> None:
        pairs = [(cost.seconds, cost.weight) for cost in self._costs]
        for num in _NEWEST:
            newer, older = pairs[-num:], pairs[:-num]
            if len(older) < num:
                return
            mean = fmean(s for s, _ in older)
            chance = _error(older, mean) * math.sqrt(1 + len(older) / num)
            if abs(fmean(s for s, _ in newer) - mean) > _CERTAIN * chance:
                self._keep(num)
                return

    def _keep(self, newest: int) -> None:
        while len(self._costs) > newest:
            self._costs.popleft()
        older = list(self._costs)[:-_RECENT]
        self._low_s = min((cost.seconds for cost in older), default=math.inf)
        self._high_s = max((cost.seconds for cost in older), default=-math.inf)
        self._num_new = newest


def _error(pairs: Sequence[tuple[float, float]], mean: float) -> float:
    """Standard error of the weighted mean of values in the order of time, which may correlate.

    The larger of that of an AR(1) process and of batch means, which also sees what lasts longer
    (D. Alexopoulos and A. F. Seila, Output Data Analysis, in the Handbook of Simulation, 1998).
    """
    num = len(pairs)
    if num < 2:
        return 0.0
    off = [weight * (seconds - mean) for seconds, weight in pairs]
    whole = sum(weight for _, weight in pairs)
    error = math.sqrt(sum(x * x for x in off) * num / (num - 1)) / whole
    error *= math.sqrt(inflation(off)) if num > _RECENT else 1.0
    size = math.isqrt(num)
    if size < _LEAST_BATCHES:
        return error
    sums = [sum(off[at : at + size]) for at in range(num % size, num, size)]
    batches = sum(x * x for x in sums) * len(sums) / (len(sums) - 1)
    return max(error, math.sqrt(batches) / whole)
