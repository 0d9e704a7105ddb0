"""A cost as a function of the number of ranks, fitted to measured points. Pure.

``seconds(r) = constant_s + per_level_s * log_16(r) + per_rank_s * r``: what is the same for any
number, what each level of a tree adds, what one process does for every rank. No term is below 0.
The fit makes the relative deviations small, since costs span decades; it uses fewer terms than
there are points, so that a deviation can show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import is_amount

#: Children of a rank in a meeting (checkfreq/ranks/tree.py, which needs torch).
FAN_IN = 16
_MOST_RANKS = 10**9
#: Deviations from less count as if it were this.
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class Point:
    """A measured cost. ``origin``: where it was measured, in words."""

    ranks: int
    seconds: float
    origin: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.ranks, bool) or not isinstance(self.ranks, int):
            raise ConfigError(f"ranks: expected a whole number, got {self.ranks!r}")
        if not 1 <= self.ranks <= _MOST_RANKS:
            raise ConfigError(f"ranks: expected 1 to {_MOST_RANKS}, got {self.ranks}")
        if not is_amount(self.seconds):
            raise ConfigError(f"seconds: expected a finite number >= 0, got {self.seconds!r}")


@dataclass(frozen=True, slots=True)
class Fit:
    """The function and the points that it was fitted to, by number of ranks."""

    constant_s: float
    per_level_s: float
    per_rank_s: float
    points: tuple[Point, ...]

    def at(self, ranks: int) -> float:
        """Seconds at a number of ranks."""
        terms = (self.constant_s, self.per_level_s, self.per_rank_s)
        return sum(term * part for term, part in zip(terms, _parts(ranks), strict=True))

    def deviation(self, point: Point) -> float:
        """By which part the function is above (or below) a point; 0 where both are 0."""
        fitted_s = self.at(point.ranks)
        if not point.seconds:
            return math.inf if fitted_s else 0.0
        return fitted_s / point.seconds - 1

    @property
    def worst(self) -> float:
        """The largest deviation, without its sign."""
        return max(abs(self.deviation(point)) for point in self.points)

    @property
    def largest(self) -> int:
        """The most ranks that were measured."""
        return self.points[-1].ranks

    def beyond(self, ranks: int) -> float:
        """How many times the largest measured number ``ranks`` is; 1 or less: not extrapolated."""
        return ranks / self.largest


def fitted(points: Sequence[Point]) -> Fit:
    """The function closest to the points; ConfigError without any."""
    if not points:
        raise ConfigError("a fit needs at least one measured point")
    ordered = tuple(sorted(points, key=lambda point: point.ranks))
    weights = [1 / max(point.seconds, _LEAST_S) for point in ordered]
    num_sizes = len({point.ranks for point in ordered})
    found = [
        (_squares(terms, ordered, weights), terms)
        for used in _subsets(min(3, num_sizes - 1))
        if (terms := _solved(used, ordered, weights)) is not None
    ]
    _, best = min(found)
    return Fit(*best, ordered)


def _parts(ranks: int) -> tuple[float, float, float]:
    return 1.0, math.log(max(1, ranks), FAN_IN), float(ranks)


def _subsets(most: int) -> list[tuple[int, ...]]:
    """The terms to try, at most so many; one size tells a constant alone."""
    if not most:
        return [(0,)]
    return [used for count in range(1, most + 1) for used in combinations(range(3), count)]


def _squares(terms: Sequence[float], points: Sequence[Point], weights: Sequence[float]) -> float:
    fit = Fit(terms[0], terms[1], terms[2], tuple(points))
    return sum(
        (weight * (fit.at(point.ranks) - point.seconds)) ** 2
        for point, weight in zip(points, weights, strict=True)
    )


def _solved(
    used: Sequence[int], points: Sequence[Point], weights: Sequence[float]
) -> tuple[float, float, float] | None:
    """Least squares with the terms ``used`` alone; None if that makes one negative, or cannot be.

    The best of all subsets without negative terms is the best with no term below 0.
    """
    rows = [
        [weight * _parts(point.ranks)[term] for term in used]
        for point, weight in zip(points, weights, strict=True)
    ]
    wanted = [weight * point.seconds for point, weight in zip(points, weights, strict=True)]
    normal = [[sum(row[i] * row[j] for row in rows) for j in range(len(used))]
              for i in range(len(used))]  # fmt: skip
    right = [sum(row[i] * value for row, value in zip(rows, wanted, strict=True))
             for i in range(len(used))]  # fmt: skip
    found = _eliminated(normal, right)
    if found is None or min(found) < 0:
        return None
    by_term = dict(zip(used, found, strict=True))
    return by_term.get(0, 0.0), by_term.get(1, 0.0), by_term.get(2, 0.0)


def _eliminated(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solves a small system of equations by Gaussian elimination; None if it is singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        if abs(rows[pivot][column]) <= 1e-12 * max(map(abs, rows[pivot])):
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for index in range(size):
            if index != column:
                factor = rows[index][column] / rows[column][column]
                rows[index] = [
                    a - factor * b for a, b in zip(rows[index], rows[column], strict=True)
                ]
    return [row[-1] / row[index] for index, row in enumerate(rows)]
