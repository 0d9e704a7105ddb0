"""What ranks cost one another: files of measured points, and meetings as a real run spaces them."""

from __future__ import annotations

import json

from benchmarks.ranks.points import POINTS, points, text
from checkfreq.ranks.tree import FAN_IN as FAN_IN_OF_THE_TREE
from checkfreq.simulation.fitting import FAN_IN

BOUND = 0.035


def lines(*found: dict[str, object]) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in found)


def test_the_points_of_the_package_are_those_of_the_result_lines() -> None:
    assert POINTS.read_text() == text(), "run: python -m benchmarks.ranks.points"


def test_the_tree_that_is_fitted_is_the_tree_that_is_built() -> None:
    assert FAN_IN == FAN_IN_OF_THE_TREE


def test_a_result_line_with_seconds_is_a_point_and_the_newest_of_a_size_counts() -> None:
    how = {"command": "python -m x", "commit": "abc1234", "machine": {"cores": 2}}
    measured = [
        {"what": "restore", "ranks": 16, "seconds": 3.0, **how},
        {"what": "commit", "ranks": 256, "seconds": 2.0, **how},
        {"what": "commit", "ranks": 16, "seconds": 1.0, **how},
        {"what": "commit", "ranks": 16, "seconds": 1.5, **how},
        {"what": "meeting", "ranks": 16, "arm": "star", **how},
        {"what": "else", "ranks": 16, "seconds": 9.0, **how},
    ]
    found = [(each["what"], each["ranks"], each["seconds"]) for each in points(measured)]
    assert found == [("commit", 16, 1.5), ("commit", 256, 2.0), ("restore", 16, 3.0)]
