"""What ranks cost one another: the points of the package are those that were measured."""

from __future__ import annotations

from benchmarks.ranks.points import POINTS, text
from checkfreq.ranks.tree import FAN_IN as FAN_IN_OF_THE_TREE
from checkfreq.simulation.fitting import FAN_IN


def test_the_points_of_the_package_are_those_of_the_result_lines() -> None:
    assert POINTS.read_text() == text(), "run: python -m benchmarks.ranks.points"


def test_the_tree_that_is_fitted_is_the_tree_that_is_built() -> None:
    assert FAN_IN == FAN_IN_OF_THE_TREE
