"""Overhead from paired windows: the estimate, its interval, and the search for the smallest k.

Pure. A `Sample` is one window with checkpoints, compared with the windows without before and after
it. The estimate is the ratio of sums over all samples. Its variance is that of a ratio
(linearised), plus twice the covariance of successive samples if positive, because neighbours share
a window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, median, quantiles

#: Student's t that 97.5 % are below, where the expansion is too far off: by degrees of freedom.
_T_975 = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764}


@dataclass(frozen=True, slots=True)
class Sample:
    """The seconds that a window's checkpoints added, and the seconds of training they cover."""

    cost_s: float
    base_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Overhead as a fraction, its standard error, and its 95 % interval."""

    mean: float
    stderr: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    def meets(self, bound: float, *, margin: float = 0.005) -> bool:
        """Whether it is at most the bound, and its upper limit at most ``margin`` above."""
        return self.mean <= bound and self.high <= bound + margin


def sample(*, seconds: float, iterations: int, covered: int, clean_s: Sequence[float]) -> Sample:
    """A window of ``iterations`` whose checkpoints cover ``covered`` of them.

    ``clean_s``: seconds per iteration of the adjacent windows without checkpoints.
    """
    iteration_s = mean(clean_s)
    return Sample(seconds - iterations * iteration_s, covered * iteration_s)


def estimate(samples: Sequence[Sample]) -> Estimate:
    """Cost / base over all samples; the interval is infinite for fewer than three."""
    base_s = math.fsum(each.base_s for each in samples)
    ratio = math.fsum(each.cost_s for each in samples) / base_s
    count = len(samples)
    if count < 3:
        return Estimate(ratio, math.inf, -math.inf, math.inf)
    residuals = [(each.cost_s - ratio * each.base_s) * count / base_s for each in samples]
    variance = math.fsum(r * r for r in residuals) / (count - 1)
    lagged = math.fsum(a * b for a, b in itertools.pairwise(residuals)) / count
    stderr = math.sqrt((variance + 2 * max(0.0, lagged)) / count)
    reach = t_975(count - 1) * stderr
    return Estimate(ratio, stderr, ratio - reach, ratio + reach)


def t_975(freedom: int) -> float:
    """Student's t that 97.5 % are below: from five degrees on by Cornish-Fisher expansion."""
    if freedom in _T_975:
        return _T_975[freedom]
    z = NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile; a single value is both."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, whatever the distribution: two of the values, by rank.

    Infinite for fewer than six.
    """
    ordered, tail, rank = sorted(values), 0.0, 0
    while rank < len(ordered) // 2:
        tail += math.comb(len(ordered), rank) / 2 ** len(ordered)
        if tail > 0.025:
            break
        rank += 1
    if rank == 0:
        return -math.inf, math.inf
    return ordered[rank - 1], ordered[-rank]


@dataclass(frozen=True, slots=True)
class Smallest:
    """The smallest interval that keeps a bound: limited by cost, and by storage."""

    by_cost: int
    by_storage: int

    @classmethod
    def of(cls, *, cost_s: float, busy_s: float, iteration_s: float, bound: float) -> Smallest:
        """``busy_s``: how long after a checkpoint the next one cannot start."""
        steps = [
            max(1, math.ceil(seconds / iteration_s * (1 - 1e-9)))
            for seconds in (cost_s / bound, busy_s)
        ]
        return cls(*steps)

    @property
    def k(self) -> int:
        """The smallest interval within both limits."""
        return max(self.by_cost, self.by_storage)


def undisturbed(foreign: Sequence[float], *, margin: float = 0.1) -> list[bool]:
    """Which rounds had at most ``margin`` more foreign CPU time (a share) than the median round.

    Whole rounds are excluded, and only for what other processes did: every arm loses the same
    number, so no arm is favoured.
    """
    limit = median(foreign) + margin
    return [share <= limit for share in foreign]


def smallest_that_meets(lowest: int, highest: int, meets: Callable[[int], bool]) -> int | None:
    """The smallest of ``lowest..highest`` that keeps the bound, by bisection; None if none does.

    Correct if keeping the bound is monotonic: overhead is o / (k T), and a longer interval does not
    make a single checkpoint more expensive.
    """
    if not meets(highest):
        return None
    while lowest < highest:
        middle = (lowest + highest) // 2
        if meets(middle):
            highest = middle
        else:
            lowest = middle + 1
    return highest


def allowed_interval(smallest: int) -> int:
    """The largest interval that counts as close to the ``smallest`` one that keeps the bound."""
    return max(smallest + 1, math.floor(1.1 * smallest + 1e-9))


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of a run with checkpoints, on the run's time axis, and what it cost."""

    start_s: float
    end_s: float
    sample: Sample


def sliding(stretches: Sequence[Stretch], *, width_s: float) -> list[tuple[float, float]]:
    """(time, overhead) at every stretch's end, over all that ended within ``width_s`` before."""
    points = []
    for last in stretches:
        inside = [s.sample for s in stretches if last.end_s - width_s < s.end_s <= last.end_s]
        points.append((last.end_s, estimate(inside).mean))
    return points
