"""The parts of a restart are what its marks say, and add up to the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lab.results import ROOT
from benchmarks.restarts.lives import packages_at
from benchmarks.restarts.parts import PARTS, medians, restart_of
from benchmarks.restarts.table import restarts

MARKS = [
    {"mark": mark, "at_s": 10.0 + number, "calls": {"find": 0.25}}
    for number, mark in enumerate(PARTS.values(), 1)
]
LINE = {
    **{"mib": 85.0, "workers": 2, "seconds": 4.5, "low": 4.25, "high": 5.0},
    "parts": dict.fromkeys(PARTS, 0.5),
    **{"command": "python -m benchmarks.restarts", "commit": "abc1234"},
    "machine": {"cores": 2, "accelerator": None},
    "versions": {"torch": "2.13.0"},
}


def test_the_parts_add_up_from_the_kill_to_the_end_of_the_first_update() -> None:
    found = restart_of(MARKS, killed_s=10.5, held_s=[])
    assert found.parts == {name: 0.5 if name == "interpreter" else 1.0 for name in PARTS}
    assert found.seconds == len(PARTS) - 0.5
    assert found.calls == {"find": 0.25}
    assert found.first_hold is None


def test_the_first_hold_is_compared_with_the_median_of_the_others() -> None:
    found = restart_of(MARKS, killed_s=10.0, held_s=[0.006, 0.001, 0.002, 0.9])
    assert found.first_hold == pytest.approx(3.0)


def test_a_missing_mark_is_an_error_that_names_it() -> None:
    with pytest.raises(KeyError, match="batch"):
        restart_of([m for m in MARKS if m["mark"] != "batch"], killed_s=10.0, held_s=[])


def test_a_name_that_some_rounds_lack_has_the_median_of_the_others() -> None:
    assert medians([{"a": 1.0, "b": 4.0}, {"a": 3.0}]) == {"a": 2.0, "b": 4.0}


def test_the_table_has_a_row_for_each_state_and_arm_with_the_imports_in_one_column() -> None:
    memory = {"against_baseline": 0.3, "first_held_ms": 1.5, "later_held_ms": 1.25}
    text = restarts([{**LINE, "arm": "baseline"}, {**LINE, **memory, "arm": "memory"}])
    parts = "0.50 s | 1.50 s | 0.50 s | 1.00 s | 0.50 s | 0.50 s"
    whole = "4.50 s (4.25 to 5.00)"
    assert f"| 85 MiB | baseline | {whole} | - | {parts} | - | - |" in text
    assert f"| 85 MiB | memory | {whole} | 0.30 | {parts} | 1.5 ms | 1.2 ms |" in text


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout")
def test_the_packages_of_a_revision_are_those_that_it_had(tmp_path: Path) -> None:
    tree = packages_at("HEAD", ROOT, tmp_path)
    assert {path.name for path in tree.iterdir()} == {"checkfreq", "iterators"}


def test_an_unknown_revision_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        packages_at("nowhere", ROOT, tmp_path)
