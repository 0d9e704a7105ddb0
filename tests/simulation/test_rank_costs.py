"""What ranks cost one another: files of measured points, and meetings as a real run spaces them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.ranks.points import POINTS, points, text
from checkfreq.errors import ConfigError
from checkfreq.ranks.tree import FAN_IN as FAN_IN_OF_THE_TREE
from checkfreq.simulation.fitting import FAN_IN
from checkfreq.simulation.rank_costs import (
    FREE,
    RankCosts,
    default_rank_costs,
    rank_costs,
    read_rank_costs,
)

BOUND = 0.035


def lines(*found: dict[str, object]) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in found)


def meetings_of(seconds: float) -> RankCosts:
    return rank_costs(lines({"what": "meeting", "ranks": 2, "seconds": seconds}), name="made")


def test_the_points_of_the_package_are_those_of_the_result_lines() -> None:
    assert POINTS.read_text() == text(), "run: python -m benchmarks.ranks.points"


def test_the_points_of_the_package_say_where_they_were_measured() -> None:
    costs = default_rank_costs()
    assert "meeting" in costs.fits
    for fit in costs.fits.values():
        assert all("commit" in point.origin for point in fit.points)


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


def test_result_lines_can_be_given_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    how = {"command": "python -m x", "commit": "abc1234", "machine": {"cores": 2}}
    path.write_text(
        lines(
            {"benchmark": "ranks", "what": "commit", "ranks": 16, "seconds": 0.5, **how},
            {"benchmark": "ranks", "what": "meeting", "ranks": 16, "arm": "star"},
        )
        + "\n"
    )
    costs = read_rank_costs(path)
    (point,) = costs.fits["commit"].points
    assert point.origin == "python -m x, commit abc1234, 2 cores"
    assert costs.seconds("commit", 100_000) == 0.5
    assert costs.seconds("meeting", 100_000) == costs.seconds("restore", 100_000) == 0


def test_a_rank_alone_meets_nobody() -> None:
    assert meetings_of(1.0).seconds("meeting", 1) == 0
    assert FREE.boundary_s(8, iteration_s=1.0, interval_steps=10, max_overhead=BOUND) == 0


@pytest.mark.parametrize(
    ("meeting_s", "iteration_s", "interval_steps", "apart_steps"),
    [
        (1e-6, 1.0, 10, 1),  # every second, whatever they cost
        (1e-6, 0.1, 100, 10),
        (1e-6, 0.1, 4, 4),  # and where a checkpoint may be due
        (0.035, 1.0, 1, 4),  # 35 ms are a quarter of the bound of 4 s
        (0.16, 1.0, 1, 10),  # but within 10 s
        (0.7, 1.0, 1, 40),  # unless half of the bound would be less than they cost then
        (5.0, 1.0, 1, 60),  # and within a minute, whatever they cost
    ],
)
def test_meetings_are_as_far_apart_as_in_a_run(
    meeting_s: float, iteration_s: float, interval_steps: int, apart_steps: int
) -> None:
    found_s = meetings_of(meeting_s).boundary_s(
        2, iteration_s=iteration_s, interval_steps=interval_steps, max_overhead=BOUND
    )
    assert found_s == pytest.approx(meeting_s / apart_steps)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "found none"),
        (lines({"what": "commit", "ranks": 2}), "found none"),
        ("{", "line 1: expected an object in JSON"),
        ("[1]", "line 1: expected an object in JSON"),
        ("[" * 100_000, "line 1: expected an object in JSON"),
        (
            lines({"what": "lunch", "ranks": 2, "seconds": 1}),
            "meeting, commit, restore, got 'lunch'",
        ),
        (lines({"what": ["commit"], "ranks": 2, "seconds": 1}), "expected what to be one of"),
        (lines({"what": "commit", "seconds": 1}), "line 1: ranks"),
        (lines({"what": "commit", "ranks": 2, "seconds": "1"}), "line 1: seconds"),
        (lines({"what": "commit", "ranks": 2, "seconds": -1}), "line 1: seconds"),
    ],
)
def test_a_file_without_points_is_refused_with_its_line(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rank_costs(given, name="measured.jsonl")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "measured.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"measured\.jsonl: expected lines of JSON"):
        read_rank_costs(path)
