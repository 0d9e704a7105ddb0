"""The demo's verdicts, on runs written by hand: it must be able to say no."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.demo import EPOCHS, INTERVAL, Kill, compare
from benchmarks.lab.runs import Run

LENGTH, ALL = 50, 800


def run_that_left(folder: Path, *, weights: str = "aa", **epoch: Any) -> Run:
    run = Run(folder, [], deadline_s=time.monotonic() + 60)
    report = {"weights": weights, "optimizer": "bb"}
    (folder / "report.json").write_text(json.dumps(report))
    lines = [
        {"epoch": number, "served": ALL, "exactly_once": True, **epoch} for number in range(EPOCHS)
    ]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        ({}, []),
        ({"weights": "cc"}, [2]),
        ({"served": ALL - 1}, [1]),
        ({"exactly_once": False}, [1]),
        ({"epoch": 0}, [1]),
    ],
    ids=["equal", "weights", "a sample lost", "a sample doubled", "an epoch missing"],
)
def test_what_differs_between_runs_is_noticed(
    other: dict[str, Any], wrong: list[int], tmp_path: Path
) -> None:
    claims = compare(
        run_that_left(tmp_path / "a"), run_that_left(tmp_path / "b", **other), num_samples=ALL
    )
    assert [number for number, claim in enumerate(claims) if not claim.holds] == wrong


@pytest.mark.parametrize(
    ("at_step", "written_step", "restored_step", "holds"),
    [
        (25, None, 20, True),
        (25, None, 25 - 2 * INTERVAL, True),
        (25, None, 25 - 2 * INTERVAL - 1, False),
        (25, None, 26, False),
        (25, 20, 20, True),
        (25, 20, 10, False),
        (LENGTH, None, LENGTH, False),
    ],
    ids=[
        "within an interval",
        "two intervals",
        "more than two intervals",
        "resumed from the future",
        "the checkpoint being written was kept",
        "the checkpoint being written was lost",
        "not in mid-epoch",
    ],
)
def test_a_kill_may_lose_two_intervals_but_no_checkpoint_being_written(
    at_step: int, written_step: int | None, restored_step: int, holds: bool
) -> None:
    kill = Kill(when="in the test", at_unix_s=0.0, at_step=at_step, written_step=written_step)
    assert kill.claim(restored_step, LENGTH).holds is holds
