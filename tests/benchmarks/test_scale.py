"""Scale: arithmetic of its figures, and toy runs to the end."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.scale.measure import figures
from tests.benchmarks.test_benchmarks_run import lines_of as printed_by

SECONDS = {
    "held_s": [0.5, 0.002, 0.004, 0.006],
    "save_s": [0.5, 0.001, 0.001, 0.001],
    "added_s": [0.5, 0.01, 0.02, 0.03],
    "durable_s": [9.0, 2.0, 4.0, 8.0],
    "persist_s": [8.0, 1.0, 2.0, 4.0],
    "copy_s": [1.0, 0.5, 0.5, 0.25],
    "raw_write_s": [7.0, 1.0, 1.0, 1.0],
    "bus_s": [7.0, 0.25, 0.25, 0.25],
    "restore_s": [2.0, 4.0, 6.0],
    "raw_read_s": [1.0, 1.0, 1.0],
    "raw_fresh_s": [2.0, 2.0, 2.0],
}


# Arithmetic


def test_medians_exclude_the_first_save_which_is_reported_separately() -> None:
    found = figures(SECONDS)
    assert found["held_ms"] == 4.0
    assert found["durable_s"] == 4.0
    assert (found["first_held_ms"], found["first_durable_s"]) == (500.0, 9.0)
    assert found["restore_s"] == 4.0  # of all rounds: a restore has no first


def test_ratios_are_the_limits_time_over_ours_within_a_round() -> None:
    found = figures(SECONDS)
    assert found["persist_against_raw"] == 0.5
    assert found["durable_against_raw"] == 0.25
    assert found["copy_against_bus"] == 0.5
    assert found["restore_against_raw"] == 0.25
    assert found["restore_against_fresh"] == 0.5


# Toy runs


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("scale")
    small = ("--gib", "0.01", "1000000", "--tensors", "10", "--mib", "1", "--rounds", "1")
    small = (*small, "--lists", "99")
    found = printed_by("scale", *small, "--iterations", "20", folder=folder)
    assert {path.name for path in folder.iterdir()} == {"stdout"}, "scratch was left"
    return found


def test_it_prints_a_line_per_size_and_number_of_tensors(lines: list[dict[str, Any]]) -> None:
    assert [(line["what"], line.get("gib"), line.get("tensors")) for line in lines] == [
        ("size", 0.01, 64),
        ("size", 1_000_000.0, None),
        ("tensors", None, 10),
        ("list", None, None),
        ("list", None, None),
    ]
    measured = [line for line in lines if "why_not" not in line and line["what"] != "list"]
    assert all(SECONDS.keys() - {"held_s", "save_s", "added_s"} <= line.keys() for line in measured)
    assert all(line["storage"] for line in lines)
    assert measured[1]["boundary_us_low"] <= measured[1]["boundary_us"]


def test_memory_holds_two_slots_and_the_worker(lines: list[dict[str, Any]]) -> None:
    line = lines[0]
    assert line["slots_gib"] == pytest.approx(0.02, rel=0.01)
    assert line["worker_gib"] > 0
    assert line["memory_gib"] == pytest.approx(line["trainer_gib"] + line["worker_gib"], abs=2e-4)
    assert line["memory_gib"] > line["slots_gib"]
