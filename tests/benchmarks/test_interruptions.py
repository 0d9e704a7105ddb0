"""Interruptions: what restarts cost, and a real kill."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from benchmarks.interruptions.restarts import (
    BASE,
    Restart,
    differing,
    redone,
    restarts,
)
from tests.benchmarks.test_benchmarks_run import lines_of


def updates(*steps: int, wrong: int | None = None) -> list[dict[str, Any]]:
    return [
        {"step": step, "loss": -1.0 if place == wrong else 1 / step, "time_unix_s": 100.0 + place}
        for place, step in enumerate(steps)
    ]


@pytest.mark.parametrize(
    ("steps", "count"),
    [([], 0), ([1, 2, 3], 0), ([1, 2, 3, 3, 4], 1), ([1, 2, 1, 2, 1, 2], 4)],
)
def test_an_update_is_redone_each_time_but_one(steps: list[int], count: int) -> None:
    assert redone(steps) == count


def test_a_restart_is_split_into_start_up_restore_and_first_update() -> None:
    found = restarts(
        [0.0, 10.0, 20.0, 30.0, 40.0],
        ready_s=[2.0, 13.0, 32.0, 44.0],  # the third was killed before it was ready
        restored_s=[33.0, 44.5],  # the second found no checkpoint
        updated_s=[3.0, 4.0, 15.0, 16.0, 36.0, 45.0, 46.0],
    )
    assert found == [
        Restart(startup_s=3.0, restore_s=None, first_update_s=2.0),
        Restart(startup_s=2.0, restore_s=1.0, first_update_s=3.0),
        Restart(startup_s=4.0, restore_s=0.5, first_update_s=0.5),
    ]
    assert [each.resume_s for each in found] == [5.0, 6.0, 5.0]


@pytest.mark.parametrize(
    ("made", "count"),
    [
        (updates(1, 2, 3), 0),
        (updates(1, 2, 1, 2, 3), 0),
        (updates(1, 2, 1, 2, 3, wrong=1), 1),
        (updates(1, 2), 1),
        (updates(1, 2, 3, 4), 1),
    ],
    ids=["the same", "redone to the same", "a first try differed", "one missing", "one too many"],
)
def test_every_update_is_compared_with_the_reference(
    made: list[dict[str, Any]], count: int
) -> None:
    assert differing(made, updates(1, 2, 3)) == count


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)
def test_a_training_that_was_killed_makes_the_same_updates(tmp_path: Path) -> None:
    tiny = [
        "--images",
        "3",
        "--batch-size",
        "4",
        "--image-size",
        "32",
        "--workers",
        "0",
        "--noeval",
    ]
    one_kill = ("--arms", "auto", "--every", "1000000", "--first", "2", "--no-warm-up")
    base, auto = lines_of("interruptions", *tiny, *one_kill, folder=tmp_path)
    assert (base["arm"], base["ratio"], base["kills"], base["equal"]) == (BASE, 1.0, 0, None)
    assert (auto["arm"], auto["kills"], auto["finished"], auto["equal"]) == ("auto", 1, True, True)
    assert base["iterations"] == base["needed"] == auto["needed"] == 3 * 6
    assert auto["iterations"] == auto["needed"] + auto["redone"] == auto["compared"]
    assert auto["resumes"] == 1
    assert auto["resume_s"] > auto["startup_s"] > 0  # type: ignore[operator]
    assert len(auto["curve"]) == auto["iterations"]  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["stdout"]
