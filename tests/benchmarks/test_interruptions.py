"""Interruptions: their schedule, what restarts cost, a real kill, and a table that says no."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import select
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.interruptions import measure as benchmark
from benchmarks.interruptions import plot as plot
from benchmarks.interruptions.restarts import (
    BASE,
    Restart,
    differing,
    redone,
    restarts,
)
from benchmarks.interruptions.table import interruptions
from benchmarks.lab import runs
from benchmarks.lab.runs import Run, survive
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


def test_a_trainer_that_never_ends_is_killed_on_schedule_and_then_given_up(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", [], module="tests.benchmarks.endless")
    ended = survive(run, [0.0, 0.01, 0.02], limit_s=0.03)
    assert (ended.kills, ended.finished, len(run.starts_unix_s)) == (3, False, 4)
    assert ended.seconds >= 0.03


def test_a_child_that_does_not_see_its_trainer_gone_is_killed_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    run = Run(tmp_path / "run", [str(tmp_path / "fifo")], module="tests.benchmarks.orphaning")
    with run.started(), (tmp_path / "fifo").open("rb", buffering=0) as fifo:
        assert fifo.read(1) == b"x"
        reader = os.dup(fifo.fileno())
    with os.fdopen(reader, "rb", buffering=0) as fifo:
        readable, _, _ = select.select([fifo], [], [], 30.0)
        assert readable, "the child holds it open"
        assert fifo.read(1) == b""


def test_a_kill_that_hit_nothing_is_not_counted_and_nothing_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_right_after(trainer: subprocess.Popen[bytes], seconds: float) -> bool:
        assert seconds < 1
        trainer.wait()
        return False

    monkeypatch.setattr(runs, "_ends_within", ends_right_after)
    run = Run(tmp_path / "run", [], module="threading")  # it only defines
    ended = survive(run, [0.0, 0.0], limit_s=math.inf)
    assert (ended.kills, ended.finished, len(run.starts_unix_s)) == (0, True, 1)
    broken = Run(tmp_path / "broken", [], module="benchmarks.no_such_training")
    with pytest.raises(SystemExit, match="ended with status 1"):
        survive(broken, [0.0, 0.0], limit_s=math.inf)


class FakeRun:
    """It has made 4 updates, and no checkpoints."""

    starts_unix_s = (0.0,)

    def __init__(self, folder: Path) -> None:
        self.chk_dir = folder

    def steps(self) -> list[int]:
        return [1, 2, 3, 4]

    def updates(self) -> list[dict[str, Any]]:
        return updates(1, 2, 3, 4)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [{"interval_steps": 7}] if kind == "plan" and "base" not in self.chk_dir.name else []

    def ready_unix_s(self) -> list[float]:
        return []

    def report(self) -> dict[str, Any]:
        return {"weights": "w", "optimizer": "o"}


def test_arms_without_interruptions_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order, kills = list[str](), {}
    seconds = {"base-0": 10.0, "calm-0": 11.0, "base-1": 20.0, "calm-1": 33.0}

    def train(folder: Path, flags: list[str], kills_s: Any, limit_s: float) -> benchmark.Trained:
        order.append(folder.name)
        kills[folder.name] = list(itertools.islice(kills_s, 2))
        took_s = seconds.get(folder.name, 30.0)
        survival = runs.Survival(seconds=took_s, kills=0, finished=True)
        return benchmark.Trained(FakeRun(folder), survival)  # type: ignore[arg-type]

    monkeypatch.setattr(benchmark.Trained, "to_the_end", staticmethod(train))
    options = ["--repeats", "2", "--arms", "auto", "uninterrupted, auto", "synchronous"]
    args, _ = benchmark._arguments([*options, "--every-of-base", "0.5", "--first", "1"])
    args.amp = False
    benchmark.Bench(tmp_path, [], args).train()
    assert order == ["base-0", "calm-0", "base-1", "calm-1", "auto", "synchronous"]
    assert kills["auto"] == [1.0, 8.5]  # every half of the median base
    made = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert [(x["arm"], x["repeat"], x["ratio"]) for x in made] == [
        (BASE, 1, 0.6667),
        (BASE, 2, 1.3333),
        ("uninterrupted, auto", 1, 0.7333),
        ("uninterrupted, auto", 2, 2.2),
        ("auto", 1, 2.0),
        ("synchronous", 1, 2.0),
    ]
    assert [x["equal"] for x in made] == [None, True, True, True, True, True]
    assert made[-1]["k"] == 7
    assert "| 1.00 (0.67 to 1.33) |" in interruptions(made)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)
def test_a_training_that_was_killed_makes_the_same_updates(tmp_path: Path) -> None:
    tiny = (
        "--images",
        "3",
        "--batch-size",
        "4",
        "--image-size",
        "32",
        "--workers",
        "0",
        "--noeval",
    )
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
