"""The parts of a restart are what its marks say, and add up to the whole."""

from __future__ import annotations

import pytest

from benchmarks.restarts.parts import PARTS, restart_of

MARKS = [
    {"mark": mark, "at_s": 10.0 + number, "calls": {"find": 0.25}}
    for number, mark in enumerate(PARTS.values(), 1)
]


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
