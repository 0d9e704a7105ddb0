"""Running totals that do not depend on the order, or on how values are split among ranks.

A sum is kept without rounding, as a few floats that do not overlap (Shewchuk 1997, the algorithm of
``math.fsum``), and is rounded once, when it is read. So the same values give the same bits on one
rank or many, whether or not the run was interrupted. What depends on an order is ``last``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Summary:
    """What was made of the values of one metric.

    num: how many values.
    sum: of the values times their weights.
    weight: the sum of the weights.
    min, max: of the values that are not NaN; NaN if there is none.
    last: the value that came last; of several ranks', that of the last rank which had one.
    """

    num: int
    sum: float
    weight: float
    min: float
    max: float
    last: float

    @property
    def mean(self) -> float:
        """The weighted mean; NaN if the weights add up to 0."""
        return self.sum / self.weight if self.weight else math.nan


class ExactSum:
    """A sum of floats that is rounded only when it is read."""

    def __init__(self) -> None:
        self._parts: list[float] = []
        #: The sum of those that are infinite or NaN, and of overflows.
        self._special = 0.0

    def add(self, value: float) -> None:
        """Add a number."""
        if not math.isfinite(value):
            self._special += value
            return
        kept = []
        for part in self._parts:
            if abs(value) < abs(part):
                value, part = part, value
            total = value + part
            if (lost := part - (total - value)) != 0.0:
                kept.append(lost)
            value = total
        if math.isfinite(value):
            self._parts = [*kept, value]
        else:
            self._parts, self._special = [], self._special + value

    def merge(self, other: ExactSum) -> None:
        """Add everything that ``other`` holds."""
        for part in other._parts:
            self.add(part)
        self._special += other._special

    @property
    def value(self) -> float:
        """The sum, correctly rounded."""
        return math.fsum(self._parts) if self._special == 0.0 else self._special

    def state(self) -> list[float]:
        """To be given to `of`."""
        return [self._special, *self._parts]

    @classmethod
    def of(cls, state: Any) -> ExactSum:
        """The sum with this state; ValueError for anything else."""
        made = cls()
        special, *parts = _floats(state)
        made._special, made._parts = special, parts
        return made


class Tally:
    """The running totals of one metric."""

    def __init__(self) -> None:
        self._num = 0
        self._sum, self._weight = ExactSum(), ExactSum()
        self._min = self._max = self._last = math.nan

    def add(self, value: float, weight: float) -> None:
        """Count one value."""
        self._num += 1
        self._sum.add(value * weight)
        self._weight.add(weight)
        self._extend(value, value, value)

    def merge(self, later: Tally) -> None:
        """Count everything in ``later``."""
        if later._num:
            self._num += later._num
            self._sum.merge(later._sum)
            self._weight.merge(later._weight)
            self._extend(later._min, later._max, later._last)

    def _extend(self, low: float, high: float, last: float) -> None:
        # Written so that NaN never wins: comparisons with NaN are false.
        self._min = low if not self._min <= low and not math.isnan(low) else self._min
        self._max = high if not self._max >= high and not math.isnan(high) else self._max
        self._last = last

    def summary(self) -> Summary:
        """What the values add up to."""
        total, weight = self._sum.value, self._weight.value
        return Summary(self._num, total, weight, self._min, self._max, self._last)

    def state(self) -> dict[str, Any]:
        """To be given to `of`."""
        return {
            "num": self._num,
            "sum": self._sum.state(),
            "weight": self._weight.state(),
            "range": [self._min, self._max, self._last],
        }

    @classmethod
    def of(cls, state: Any) -> Tally:
        """The totals with this state; ValueError for anything else."""
        if not isinstance(state, Mapping) or type(state.get("num")) is not int:
            raise ValueError(f"expected the totals of a metric, got {state!r:.80}")
        made = cls()
        made._num = state["num"]
        made._sum, made._weight = ExactSum.of(state.get("sum")), ExactSum.of(state.get("weight"))
        made._min, made._max, made._last = _floats(state.get("range"), length=3)
        return made


def _floats(state: Any, *, length: int | None = None) -> list[float]:
    fits = isinstance(state, list) and all(type(one) is float for one in state)
    if not fits or (len(state) != length if length is not None else not state):
        raise ValueError(f"expected a list of floats, got {state!r:.80}")
    return list(state)
