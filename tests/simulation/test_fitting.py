"""A cost by the number of ranks: known functions are found again, and no term is below 0."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.errors import ConfigError
from checkfreq.simulation.fitting import FAN_IN, Fit, Point, fitted

SIZES = (2, 16, 256, 4096)


def points(function: Callable[[int], float], sizes: tuple[int, ...] = SIZES) -> list[Point]:
    return [Point(ranks, function(ranks)) for ranks in sizes]


def terms(fit: Fit) -> tuple[float, float, float]:
    return fit.constant_s, fit.per_level_s, fit.per_rank_s


@pytest.mark.parametrize(
    "true",
    [
        (1e-3, 0.0, 0.0),
        (0.0, 2e-3, 0.0),
        (0.0, 0.0, 1e-4),
        (1e-3, 2e-3, 0.0),
        (1e-3, 0.0, 1e-4),
        (1e-3, 2e-3, 1e-5),
    ],
)
def test_a_function_of_that_form_is_found_again(true: tuple[float, float, float]) -> None:
    fit = fitted(points(Fit(*true, ()).at))
    assert terms(fit) == pytest.approx(true, abs=1e-9)
    assert fit.worst == pytest.approx(0, abs=1e-6)
    assert fit.at(100_000) == pytest.approx(Fit(*true, ()).at(100_000), rel=1e-6)


@pytest.mark.parametrize(
    ("falling", "expected"),
    [
        (lambda ranks: 1.0 / ranks, "constant"),
        (lambda ranks: 0.0, "nothing"),
    ],
)
def test_what_falls_with_the_ranks_is_a_constant(
    falling: Callable[[int], float], expected: str
) -> None:
    fit = fitted(points(falling))
    assert fit.per_level_s == fit.per_rank_s == 0
    assert (fit.constant_s > 0) == (expected == "constant")


def test_one_size_gives_a_constant() -> None:
    fit = fitted([Point(16, 1.0), Point(16, 1.0)])
    assert terms(fit) == (1.0, 0.0, 0.0)


def test_two_points_leave_a_deviation_to_be_seen() -> None:
    fit = fitted([Point(16, 1.0), Point(4096, 100.0)])
    assert sum(term > 0 for term in terms(fit)) == 1
    assert fit.worst > 0.01


def test_deviations_are_relative_so_that_small_costs_count() -> None:
    fit = fitted([Point(2, 1e-3), Point(16, 1.2e-3), Point(4096, 0.05), Point(4096, 0.06)])
    assert fit.deviation(fit.points[0]) == pytest.approx(0, abs=0.2)
    assert [point.ranks for point in fit.points] == [2, 16, 4096, 4096]


def test_it_says_how_far_a_number_is_beyond_what_was_measured() -> None:
    fit = fitted(points(lambda ranks: 1e-4 * ranks))
    assert fit.largest == 4096
    assert (fit.beyond(2048), fit.beyond(4096), fit.beyond(40_960)) == (0.5, 1.0, 10.0)


def test_a_cost_of_nothing_deviates_by_nothing_or_without_limit() -> None:
    fit = fitted([Point(2, 0.0), Point(16, 0.0), Point(256, 1.0)])
    assert fit.deviation(Point(2, 0.0)) in (0.0, math.inf)
    assert Fit(0.0, 0.0, 0.0, ()).deviation(Point(2, 0.0)) == 0


@given(
    st.lists(
        st.tuples(st.integers(1, 100_000), st.floats(0, 1e4, allow_subnormal=False)),
        min_size=1,
        max_size=8,
    )
)
def test_any_points_give_a_function_that_rises(found: list[tuple[int, float]]) -> None:
    fit = fitted([Point(ranks, seconds) for ranks, seconds in found])
    assert min(terms(fit)) >= 0
    assert all(map(math.isfinite, terms(fit)))
    assert fit.at(1) <= fit.at(FAN_IN) <= fit.at(100_000)


@pytest.mark.parametrize(
    ("ranks", "seconds", "said"),
    [
        (0, 1.0, "ranks"),
        (2.5, 1.0, "ranks"),
        (True, 1.0, "ranks"),
        (10**10, 1.0, "ranks"),
        (2, -1.0, "seconds"),
        (2, math.nan, "seconds"),
        (2, "1", "seconds"),
    ],
)
def test_what_is_no_measured_point_is_refused(ranks: int, seconds: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Point(ranks, seconds)


def test_a_fit_needs_a_point() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        fitted([])
