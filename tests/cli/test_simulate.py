"""``checkfreq simulate``: of given costs, of a cluster, of a recorded run; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkfreq.cli import main
from tests.simulation.made import write_trace

pytestmark = pytest.mark.slow

RUN = ["simulate", "--iteration-s", "1", "--cost-s", "1", "--persist-s", "5", "--restart-s", "60"]
#: Seconds of a size of cluster, so that a test takes as long.
SHORT = ["--gpus", "100000", "--days", "0.2"]
CLUSTER = [*RUN, *SHORT, "--storage", "own", "--state-bytes", "6TB"]
T = 0.02

Capture = pytest.CaptureFixture[str]


def rows(argv: list[str], capsys: Capture) -> list[dict[str, Any]]:
    assert main([*argv, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_it_prints_a_line_for_each_size_and_arm(capsys: Capture) -> None:
    run = [*RUN, "--rank-costs", "none"]  # what is measured of many ranks may change
    assert main([*run, "--gpus", "8,100000", "--days", "3"]) == 0
    printed, _, notes = capsys.readouterr().out.partition("\n\n")
    head, *lines = printed.splitlines()
    assert head.split()[:5] == ["GPUS", "MTBF", "CHOSEN", "ITERATIONS", "INTERVAL"]
    assert [line.split()[0] for line in lines] == ["8"] * 7 + ["100000"] * 7
    assert lines[7].split()[:7] == ["100000", "17.7", "min", "bound", "29", "29.0", "s"]
    assert "of the work done" in notes
    assert "*:" not in notes


def test_overhead_is_a_fraction_of_the_work_like_the_bound(capsys: Capture) -> None:
    # Of the time, a checkpoint of 1 s every 2 iterations is 33 %; of the work, 50 %.
    run = [*RUN[:-4], "--persist-s", "0", "--restart-s", "0", "--max-overhead", "0.5"]
    row, *_ = rows([*run, "--mtbf-s", "1e6"], capsys)
    assert (row["interval_steps"], row["interval_s"], row["gpus"]) == (2, 2.0, None)
    assert row["overhead"] == pytest.approx(0.5, rel=1e-3)
    assert row["checkpoints"] == pytest.approx(1 / 3, rel=1e-3)


# ---- a cluster


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Points of three costs, all on a function."""
    path = tmp_path / "measured.jsonl"
    found = [
        {"what": what, "ranks": ranks, "seconds": each * ranks, "origin": "made up"}
        for what, each in (("meeting", 1e-7), ("commit", 1e-5), ("restore", 1e-4))
        for ranks in (16, 4096)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in found))
    return path


def test_points_are_shown_beside_the_functions_and_extrapolation_is_said(
    measured: Path, capsys: Capture
) -> None:
    assert main([*RUN, *SHORT, "--rank-costs", str(measured)]) == 0
    printed = capsys.readouterr().out
    points = [line.split() for line in printed.splitlines() if line.startswith("commit ")]
    assert points == [
        ["commit", "16", "160", "us", "160", "us", "+0", "%"],
        ["commit", "4096", "41", "ms", "41", "ms", "+0", "%"],
    ]
    assert "meeting: 0.1 us * ranks, within 0 % of what was measured" in printed
    assert "(made up)" in printed
    assert "at 100000 ranks 10 s: extrapolated, 24.4 times beyond the largest" in printed


def test_restores_and_meetings_take_their_time_and_commits_make_it_later(
    measured: Path, capsys: Capture
) -> None:
    run = [*RUN, *SHORT]
    free, costly = (
        {row["arm"]: row for row in rows([*run, "--rank-costs", given], capsys)}["fixed"]
        for given in ("none", str(measured))
    )
    assert free["meetings"] == 0 == len(free["ranks"])
    assert costly["meetings_of_work"] == pytest.approx(0.005)  # 10 ms every 2 s
    assert costly["restarting"] > free["restarting"]
    assert costly["ranks"]["commit"]["seconds"] == pytest.approx(1.0)
    assert costly["ranks"]["commit"]["beyond"] == pytest.approx(100_000 / 4096)
    assert costly["goodput"] < free["goodput"]


def test_restarts_are_told_apart_by_where_they_read(capsys: Capture) -> None:
    found = {row["arm"]: row for row in rows([*CLUSTER, "--rank-costs", "none"], capsys)}
    for row in found.values():
        assert {source for source, each in row["restarts"].items() if each["restarts"]} == {
            "memory",
            "local",
            "shared",
        }
        assert sum(each["share"] for each in row["restarts"].values()) == pytest.approx(1)
        parts = ("goodput", "checkpoints", "meetings", "lost", "restarting")
        assert sum(row[part] for part in parts) == pytest.approx(1)
    daly = found["daly"]["restarts"]
    assert daly["memory"]["lost_s"] < daly["local"]["lost_s"] < daly["shared"]["lost_s"]
    assert set(found["daly"]["failures_per_day"]) == {"process", "reboot", "node", "rack"}


# ---- a recorded run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A checkpoint costs 9 ms: 13 iterations' share of 3.5 %."""
    origin = {"machine": "made", "load": "none"}
    return write_trace(tmp_path, [T] * 1000, at=range(30, 1000, 30), origin=origin)


def test_it_tells_of_the_trace_and_of_each_policy_beside_the_ideal(
    trace: Path, capsys: Capture
) -> None:
    head, *arms = rows(
        ["simulate", "--trace", str(trace), "--every", "10,50", "--interval-s", "1"], capsys
    )
    assert (head["iterations"], head["checkpoints"], head["rhythm"]) == (1000, 33, 1)
    assert head["origin"] == {"machine": "made", "load": "none"}
    assert head["iteration_s"] == pytest.approx(T, rel=0.01)
    assert head["ideal_steps"] == pytest.approx(13, abs=1)
    assert [arm["arm"] for arm in arms] == ["recorded", "auto", "every 10", "every 50", "ideal"]
    recorded, auto, ten, fifty, ideal = arms
    assert (recorded["interval_steps"], recorded["checkpoints"]) == (30, 33)
    assert auto["times_ideal"] == pytest.approx(1, abs=0.3)
    assert ten["overhead"] > 0.035 > ideal["overhead"] > fifty["overhead"]
    assert fifty["placed"][:2] == [[49, 50], [99, 50]]
    assert fifty["expected_loss_s"] > ten["expected_loss_s"]


def test_it_prints_tables_for_people(trace: Path, capsys: Capture) -> None:
    with trace.open("a") as file:
        file.write('{"took": [1')
    assert main(["simulate", "--trace", str(trace), "--every", "20"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("trace.jsonl: 1000 iterations of 20 ms without checkpoints (")
    assert "33 checkpoints of 9 ms." in printed
    assert "machine: made" in printed
    assert "1 torn line is left out." in printed
    assert "Smallest fixed interval that keeps it: 13 iterations." in printed
    policies, over_time = printed.split("\n\n")[1:3]
    heads = [line.split()[0] for line in policies.splitlines()]
    assert heads == ["POLICY", "recorded", "auto", "every", "ideal"]
    assert over_time.splitlines()[0].split()[2:] == [str(100 * part) for part in range(1, 11)]
    assert "auto: interval" in over_time


# ---- refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--gpus", "8,64", "--mtbf-s", "60"], "one number of --gpus"),
        (["--gpus", "8", "--mtbf-s", "-1"], "mtbf_s"),
        ([], "--gpus, or --mtbf-s"),
        (["--mtbf-s", "60", "--rate", "spot"], "give one of them"),
        (["--gpus", "8", "--max-overhead", "1.5"], "max_overhead"),
        (["--gpus", "8", "--interval-s", "-1"], "interval_s"),
        (["--gpus", "8", "--storage", "own"], "--state-bytes"),
        (["--gpus", "8", "--state-bytes", "1GB"], "--storage shared or own"),
        (["--trace", "any"], "expected no --cost-s"),
    ],
)
def test_invalid_arguments_are_refused_with_a_sentence(
    given: list[str], said: str, capsys: Capture
) -> None:
    assert main([*RUN, *given]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
