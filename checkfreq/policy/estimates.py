"""Robust estimates over a sliding window of noisy measurements. Pure.

They follow a change of regime (another job arrives, a disk slows down) at once instead of waiting
until the window has turned over, and a single extreme value does not decide them.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TypeVar

T = TypeVar("T")

#: Medians beyond which an iteration is an outlier (a validation, a stall of the loader), and so is
#: one checkpoint's cost among few. Well above noise, so that a slow batch is not one.
OUTLIER = 4.0
_ONE_SIDED_95 = 1.645
#: Autocorrelation is capped here, since few values may show more by chance.
_MOST_CORRELATED = 0.9


class IterationTime:
    """T, the mean time of the last ``_WINDOW`` clean iterations.

    A mean, not a median: overhead is a fraction of total time, and a median would charge a loader
    that stalls now and then to checkpoints. ``value`` counts an outlier as ``limit``, as charges
    do.
    """

    _WINDOW = 256
    #: A change of level: medians of the newest eight and of the others differ by a tenth or more.
    _RECENT = 8
    _CHANGE = 0.1
    #: A drift: means of the newest sixteen and of the others differ by more than chance explains.
    _NEWER = 16
    _CERTAIN = 3.0  # standard errors

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=self._WINDOW)
        self._mean: float | None = None
        self._raw_mean: float | None = None
        self._error = 0.0
        self._spread, self._inflation = 0.0, 1.0
        self._low: float | None = None
        self._limit = math.inf
        self._num_new = 0

    def add(self, seconds: float) -> None:
        """Take in one clean iteration."""
        self._times.append(seconds)
        self._num_new += 1

    def keep(self, newest: int) -> None:
        """Forget all but the ``newest``."""
        while len(self._times) > newest:
            self._times.popleft()

    def value(self) -> float | None:
        """Seconds; None before the first. Computed anew when an eighth of the window is new."""
        if self._num_new and (self._mean is None or self._num_new * 8 >= len(self._times)):
            self.update()
        return self._mean

    def raw_mean(self) -> float | None:
        """Seconds, outliers counted in full; as of the last ``value``."""
        return self._raw_mean

    def error(self) -> float:
        """Standard error of the last ``value``; 0 before the first."""
        return self._error

    def limit(self) -> float:
        """Seconds above which an iteration is an outlier; as of the last ``value``."""
        return self._limit

    def spread(self, num: float = 1.0) -> float:
        """Standard deviation of the sum of ``num`` iterations in a row, as of ``value``."""
        return self._spread * math.sqrt(num * self._inflation)

    def low(self) -> float | None:
        """Seconds that nine in ten iterations take at least; as of the last ``value``."""
        return self._low

    def update(self) -> None:
        """Bring everything up to date."""
        self._num_new = 0
        self._follow_change()
        ascending = sorted(self._times)
        self._limit = OUTLIER * ascending[len(ascending) // 2]
        capped = _capped(list(self._times), self._limit, highest=ascending[-1])
        self._mean = fmean(capped)
        self._spread = _deviation(capped)
        self._inflation = inflation(capped)
        self._error = self._spread * math.sqrt(self._inflation / len(capped))
        self._raw_mean = fmean(ascending)
        self._low = ascending[len(ascending) // 10]

    def _follow_change(self) -> None:
        times = list(self._times)
        recent, older = sorted(times[-self._RECENT :]), sorted(times[: -self._RECENT])
        if len(older) < self._RECENT:
            return
        now, before = median(recent), median(older)
        low, high = older[len(older) // 10], older[-1 - len(older) // 10]
        # All but two of the recent ones lie outside: a few outliers are no change of level.
        is_other = recent[2] > high or recent[-3] < low
        if abs(now - before) > self._CHANGE * before and is_other:
            changed = (t for t in recent if abs(t - now) < abs(t - before))
            self._times = deque(changed, maxlen=self._WINDOW)
        else:
            highest = max(recent[-1], older[-1])
            self._follow_drift(_capped(times, OUTLIER * before, highest=highest))

    def _follow_drift(self, times: list[float]) -> None:
        """Drop the older values if the newer ones differ by more than chance explains."""
        newer, older = times[-self._NEWER :], times[: -self._NEWER]
        if len(older) < self._NEWER:
            return
        chance = _deviation(older) * math.sqrt(1 / len(newer) + 1 / len(older))
        if abs(fmean(newer) - fmean(older)) > self._CERTAIN * chance:
            for _ in older:
                self._times.popleft()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, its standard error, and a doubt: the error that values too few to show it may have.

    Only ``upper`` uses the doubt.
    """

    mean: float
    error: float
    doubt: float = 0.0

    @classmethod
    def with_upper(cls, mean: float, upper: float, *, error: float) -> Estimate:
        """The estimate whose ``upper()`` is ``upper``; what ``error`` does not explain is doubt."""
        whole = (upper - mean) / _ONE_SIDED_95
        error = min(error, whole)
        return cls(mean, error, math.sqrt(whole * whole - error * error))

    def upper(self) -> float:
        """Upper limit of the one-sided 95 % confidence interval."""
        return self.mean + _ONE_SIDED_95 * math.hypot(self.error, self.doubt)

    def plus_error(self, error: float) -> Estimate:
        """The same with an independent source of error added."""
        return replace(self, error=math.hypot(self.error, error))

    def blended(self, other: Estimate, *, part: float) -> Estimate:
        """The weighted mean with an independent estimate whose weight is ``part``."""
        rest = 1.0 - part
        return Estimate(
            rest * self.mean + part * other.mean,
            math.hypot(rest * self.error, part * other.error),
            math.hypot(rest * self.doubt, part * other.doubt),
        )

    def may_be_in(self, low: float, high: float) -> bool:
        """Whether it lies between the two, or outside by at most its standard error."""
        return low - self.error <= self.mean <= high + self.error

    def is_in(self, low: float, high: float) -> bool:
        """Whether it lies between the two, inside by at least its standard error."""
        return low + self.error <= self.mean <= high - self.error


class RecentMedian:
    """Median of the last few values of a quantity that varies little."""

    def __init__(self, window: int = 5) -> None:
        self._values: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        """Take in one value."""
        self._values.append(value)

    def value(self) -> float | None:
        """None before the first."""
        return median(self._values) if self._values else None


def trimmed(ascending: Sequence[T], part: float) -> Sequence[T]:
    """All but the lowest and the highest ``part`` of them."""
    cut = int(len(ascending) * part)
    return ascending[cut : len(ascending) - cut]


def inflation(values: Sequence[float]) -> float:
    """By how much correlation makes the variance of a sum larger, as in an AR(1) process."""
    kept = min(max(0.0, _autocorrelation(values)), _MOST_CORRELATED)
    return (1 + kept) / (1 - kept)


def _autocorrelation(values: Sequence[float]) -> float:
    """Autocorrelation at lag 1, corrected for the bias of about -1/n that n values have."""
    mean = fmean(values)
    off = [value - mean for value in values]
    whole = sum(map(operator.mul, off, off))
    return sum(map(operator.mul, off, off[1:])) / whole + 1 / len(values) if whole else 0.0


def _capped(values: list[float], limit: float, *, highest: float) -> list[float]:
    """The values, at most ``limit`` each; ``highest`` is the highest of them."""
    return values if highest <= limit else [min(value, limit) for value in values]


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation; ``statistics.stdev`` uses fractions and takes 20 times as long."""
    if len(values) < 2:
        return 0.0
    mean = fmean(values)
    # A list: this is most of what T costs, and a generator takes half as long again.
    return math.sqrt(sum([(value - mean) ** 2 for value in values]) / (len(values) - 1))
