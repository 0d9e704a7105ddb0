"""``checkfreq simulate --trace``: what it prints of a recorded run, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkfreq.cli import main
from tests.simulation.made import write_trace

Capture = pytest.CaptureFixture[str]
T = 0.02


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A checkpoint costs 9 ms: 13 iterations' share of 3.5 %."""
    origin = {"machine": "made", "load": "none"}
    return write_trace(tmp_path, [T] * 1000, at=range(30, 1000, 30), origin=origin)


def rows(argv: list[str], capsys: Capture) -> list[dict]:
    assert main(["simulate", *argv, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_it_tells_of_the_trace_and_of_each_policy_beside_the_ideal(
    trace: Path, capsys: Capture
) -> None:
    head, *arms = rows(["--trace", str(trace), "--every", "10,50", "--interval-s", "1"], capsys)
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
