"""A cost by the number of ranks: known functions are found again, and no term is below 0."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
