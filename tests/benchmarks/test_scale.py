"""Scale: arithmetic of its figures, what limits are measured with, and toy runs to the end."""

from __future__ import annotations

import mmap
import zlib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.rawio import RawWriter, incompressible
from benchmarks.scale.measure import figures
from benchmarks.scale.peak import Peak
from tests.benchmarks.test_benchmarks_run import lines_of as printed_by

#: Runs what users have beside us: large frameworks (`make test-more`).

MIB = 2**20

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


def touched(num_bytes: int) -> memoryview:
    """Memory that is there, gone with its last view."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return memoryview(mmap.mmap(-1, num_bytes, flags=flags))


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


# Limits


def test_a_raw_write_of_little_data_over_and_over_has_the_full_length(tmp_path: Path) -> None:
    path, num_bytes = tmp_path / "raw", 3 * MIB + 4096
    with RawWriter(path, num_bytes, chunk_bytes=MIB, source_bytes=MIB + 1) as writer:
        writer.once()
        data = path.read_bytes()
    assert len(data) == num_bytes
    assert data[: 2 * MIB] != bytes(2 * MIB)
    assert data[2 * MIB :] == data[: num_bytes - 2 * MIB]


def test_the_limits_use_incompressible_data() -> None:
    memory = incompressible(9 * MIB)
    data = bytes(memory)
    assert len(data) == 9 * MIB
    assert len(zlib.compress(data, 1)) > 9 * MIB


def test_a_peak_is_seen_after_its_memory_is_gone() -> None:
    peak = Peak()
    touched(64 * MIB).release()
    if not peak._is_exact:
        pytest.skip("this kernel's peak cannot be set back")
    assert peak.growth() >= 60 * MIB


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
