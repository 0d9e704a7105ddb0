"""``checkfreq simulate``: what ranks cost one another; failures of processes, nodes and racks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkfreq.cli import main

RUN = ["simulate", "--iteration-s", "1", "--cost-s", "1", "--persist-s", "5", "--restart-s", "60"]
#: Seconds of a size of cluster, so that a test takes as long.
SHORT = ["--gpus", "100000", "--days", "0.2"]
CLUSTER = [*RUN, *SHORT, "--storage", "own", "--state-bytes", "6TB"]

Capture = pytest.CaptureFixture[str]


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


def rows(capsys: Capture, *given: str) -> dict[str, dict[str, Any]]:
    """By arm."""
    assert main([*given, "--json"]) == 0
    return {row["arm"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}


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
    free = rows(capsys, *run, "--rank-costs", "none")["fixed"]
    costly = rows(capsys, *run, "--rank-costs", str(measured))["fixed"]
    assert free["meetings"] == 0 == len(free["ranks"])
    assert costly["meetings_of_work"] == pytest.approx(0.005)  # 10 ms every 2 s
    assert costly["restarting"] > free["restarting"]
    assert costly["ranks"]["commit"]["seconds"] == pytest.approx(1.0)
    assert costly["ranks"]["commit"]["beyond"] == pytest.approx(100_000 / 4096)
    assert costly["goodput"] < free["goodput"]


def test_restarts_are_told_apart_by_where_they_read(capsys: Capture) -> None:
    found = rows(capsys, *CLUSTER, "--rank-costs", "none")
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
