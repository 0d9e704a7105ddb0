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
    median,
    redone,
    restarts,
    schedule,
    thinned,
)
from benchmarks.interruptions.table import interruptions
from benchmarks.lab import runs
from benchmarks.lab.plots import save
from benchmarks.lab.runs import Run, survive
from tests.benchmarks.test_benchmarks_run import lines_of
from tests.benchmarks.test_tables import HOW


def updates(*steps: int, wrong: int | None = None) -> list[dict[str, Any]]:
    return [
        {"step": step, "loss": -1.0 if place == wrong else 1 / step, "time_unix_s": 100.0 + place}
        for place, step in enumerate(steps)
    ]


def test_interruptions_come_at_equal_distances_after_the_first() -> None:
    assert list(itertools.islice(schedule(2.5, 10.0), 4)) == [2.5, 12.5, 22.5, 32.5]


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


def test_a_restart_that_came_to_no_update_is_not_counted() -> None:
    times = {"ready_s": [2.0, 13.0], "restored_s": [14.0], "updated_s": [3.0]}
    assert restarts([0.0, 10.0], **times) == []


def test_the_median_ignores_unknown_values() -> None:
    assert median([3.0, None, 1.0, 2.0]) == 2.0
    assert median([None]) is None


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


def test_a_thinned_curve_keeps_its_ends() -> None:
    made = updates(*range(1, 1001))
    curve = thinned(made, start_unix_s=99.0, most=5)
    assert [step for _, step, _ in curve] == [1, 251, 501, 750, 1000]
    assert curve[0] == [1.0, 1, 1.0]
    assert thinned(made[:3], start_unix_s=99.0) == [[n, n, 1 / n] for n in (1, 2, 3)]
    assert thinned([], start_unix_s=0.0) == []


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


def test_a_trainer_that_ends_is_not_killed(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", [], module="threading")  # it only defines
    ended = survive(run, schedule(1e6, 1e6), limit_s=math.inf)
    assert (ended.kills, ended.finished, len(run.starts_unix_s)) == (0, True, 1)


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


@pytest.mark.parametrize("option", ["--every", "--every-of-base", "--patience", "--repeats"])
def test_options_that_must_be_positive_are_refused_otherwise(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark._arguments([option, "0"])
    assert f"{option} must be more than 0" in capsys.readouterr().err


def test_every_file_is_read_before_the_base(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "1").write_bytes(bytes((1 << 20) + 7))
    (tmp_path / "2").write_bytes(bytes(3))
    assert benchmark.read_all(tmp_path) == (1 << 20) + 10


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


def test_a_failed_trainer_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", [], module="benchmarks.no_such_training")
    with pytest.raises(SystemExit, match=r"(?s)ended with status 1; .*No module named"):
        survive(run, (), limit_s=math.inf)


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


def line(arm: str, **other: Any) -> dict[str, Any]:
    setting = {"model": "m", "batch": 16, "image_size": 64, "epochs": 3, "workers": 2, "amp": False}
    setting |= {"data": "generated", "deterministic": True, "every_of_base": 0.6, "patience": 3.0}
    found = {"seed": 0, "seconds": 20.0, "ratio": 1.0, "finished": True, "reached": 1.0}
    found |= {"kills": 2, "redone": 7, "needed": 72, "resume_s": 4.0, "restore_s": 0.25}
    found |= {"checkpoints": 9, "k": 5, "equal": True, "every_s": 12.0}
    found |= {"curve": [[1.0, 1, 2.0], [9.0, 72, 0.5]]}
    return {"arm": arm, **setting, **found, **HOW, **other}


def test_the_table_has_medians_over_seeds_and_the_newest_of_each() -> None:
    text = interruptions(
        [
            line("auto", ratio=9.0, equal=False),
            line("auto", ratio=1.4),
            line("auto", ratio=1.6, seed=1, redone=9, k=6),
        ]
    )
    training = "m, 16 × 64 px, 3 epochs, generated images"
    assert f"| {training} | auto | 20 s | 1.50 (1.40 to 1.60) | 2, every 12 s |" in text
    assert "| 7 to 9 of 72 | 4.00 s | 0.25 s | 9 | 5 to 6 | yes |" in text


@pytest.mark.parametrize(
    "other",
    [
        {"every_of_base": None, "every_s": 600.0},
        {"amp": True},
        {"data": "imagenet"},
        {"needed": 99},
        {"machine": {"cores": 2, "accelerator": "a GPU"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_different_training_has_its_own_row(other: dict[str, Any]) -> None:
    text = interruptions([line("auto", **other), line("auto", ratio=1.4)])
    assert text.count("\n| m, ") == 2


def test_other_distances_have_rows_of_their_own_only_if_they_were_given() -> None:
    given = [line("auto", every_of_base=None, every_s=every_s) for every_s in (60.0, 600.0)]
    assert interruptions(given).count("\n| m, ") == 2
    assert interruptions([line("auto"), line("auto", every_s=12.5)]).count("\n| m, ") == 1


def test_repeats_are_those_of_the_last_call() -> None:
    older = [line("auto", ratio=9.0), line("auto", ratio=9.5, repeat=2)]
    newer = [line("auto", ratio=1.2, repeat=1), line("auto", ratio=1.4, repeat=2)]
    assert "| 1.30 (1.20 to 1.40) |" in interruptions([*older, *newer])
    assert "| 1.20 |" in interruptions([*older, newer[0]])


def test_the_table_says_what_was_given_up_and_what_differs() -> None:
    never = line("epoch boundary", finished=False, ratio=3.0, reached=0.333, equal=None)
    text = interruptions([never, line("synchronous", equal=False, resume_s=None)])
    assert "| epoch boundary | 20 s | given up at 3.0, 33 % done | 2, every 12 s |" in text
    assert "| 9 | epoch | - |" in text
    assert "| 7 of 72 | - | 0.25 s | 9 | 5 | no |" in text


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
def test_the_newest_training_is_drawn_the_same_every_time(tmp_path: Path) -> None:
    older = [line(BASE), line("synchronous")]
    never = line("epoch boundary", finished=False, equal=None)
    bases = [line(BASE, repeat=1), line(BASE, repeat=2)]
    pictures = []
    for name in ("1.svg", "2.svg"):
        figure = plot.draw([*older, *bases, line("auto"), never])
        assert figure is not None
        save(figure, tmp_path / name)
        pictures.append((tmp_path / name).read_text())
    assert pictures[0] == pictures[1]
    assert ">auto, 2 SIGKILLs: equal at every update</text>" in pictures[0]
    assert ">epoch boundary (given up)</text>" in pictures[0]
    assert "synchronous" not in pictures[0]
    assert plot.draw([]) is None


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
def test_an_arm_that_came_to_no_update_is_not_drawn(tmp_path: Path) -> None:
    nothing = line("auto", finished=False, equal=None, curve=[])
    figure = plot.draw([line(BASE), nothing])
    assert figure is not None
    save(figure, tmp_path / "1.svg")
    assert ">auto" not in (tmp_path / "1.svg").read_text()
    assert plot.draw([line(BASE, curve=[])]) is None
