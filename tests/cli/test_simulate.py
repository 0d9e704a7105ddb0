"""``checkfreq simulate``: of clusters, of a recorded run; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkfreq.cli import main
from tests.simulation.made import write_trace

pytestmark = pytest.mark.slow

RUN = ["simulate", "--iteration-s", "1", "--cost-s", "1", "--persist-s", "5", "--restart-s", "60"]
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


# ---- refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--gpus", "8,64", "--mtbf-s", "60"], "one number of --gpus"),
        ([], "--gpus, or --mtbf-s"),
        (["--mtbf-s", "60", "--rate", "spot"], "give one of them"),
        (["--gpus", "8", "--max-overhead", "1.5"], "max_overhead"),
        (["--gpus", "8", "--storage", "own"], "--state-bytes"),
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
