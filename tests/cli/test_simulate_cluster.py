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


def test_a_size_that_was_measured_is_not_called_extrapolated(
    measured: Path, capsys: Capture
) -> None:
    run = [*RUN, "--gpus", "4096", "--days", "0.2", "--rank-costs", str(measured)]
    assert main(run) == 0
    assert "extrapolated" not in capsys.readouterr().out


def test_what_was_not_measured_is_said(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    path.write_text('{"what": "commit", "ranks": 16, "seconds": 1}')
    assert main([*RUN, *SHORT, "--rank-costs", str(path)]) == 0
    assert "meeting, restore: not measured, counted as nothing" in capsys.readouterr().out


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


def test_the_points_of_the_package_are_used_where_nothing_else_is_said(capsys: Capture) -> None:
    assert rows(capsys, *RUN, "--gpus", "64", "--days", "1")["fixed"]["meetings"] > 0
    assert rows(capsys, *RUN, "--mtbf-s", "9e3", "--days", "1")["fixed"]["meetings"] == 0


def test_meetings_that_use_up_the_bound_are_pointed_out(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "measured.jsonl"
    path.write_text('{"what": "meeting", "ranks": 16, "seconds": 5}')
    run = [*RUN, *SHORT, "--rank-costs", str(path)]
    assert main(run) == 0
    assert "From 100000 GPUs on, meetings alone add more" in capsys.readouterr().out
    assert main([*run, "--max-overhead", "0.9"]) == 0
    assert "meetings alone" not in capsys.readouterr().out


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


def test_restarts_by_source_are_printed(capsys: Capture) -> None:
    assert main([*CLUSTER, "--rank-costs", "none"]) == 0
    printed = capsys.readouterr().out
    table = printed.split("RESTARTS/DAY", 1)[1]
    for source in ("memory", "local", "shared"):
        assert f" {source} " in table
    assert "COST" not in printed


def test_on_shared_storage_nothing_is_read_from_the_disks_of_nodes(capsys: Capture) -> None:
    run = [*RUN, *SHORT, "--storage", "shared", "--state-bytes", "6TB"]
    assert rows(capsys, *run)["daly"]["restarts"]["local"]["restarts"] == 0


def test_a_given_mean_time_between_failures_is_that_of_all_kinds_together(capsys: Capture) -> None:
    row = rows(capsys, *CLUSTER, "--mtbf-s", "600")["daly"]
    assert row["mtbf_s"] == pytest.approx(600)


def test_rates_and_bandwidths_can_be_given(capsys: Capture) -> None:
    run = [*CLUSTER, "--failing", "process=0,reboot=0,node=0.01,rack=0", "--rank-costs", "none"]
    row = rows(capsys, *run, "--reading", "shared=1TB", "--gpus-per-node", "4")["daly"]
    assert row["failures_per_day"] == {"node": 250.0}
    assert row["restarts"]["shared"]["share"] == 1
    assert row["restarts"]["shared"]["takes_s"] == pytest.approx(66, rel=0.2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--gpus", "8", "--storage", "own"], "--state-bytes"),
        (["--mtbf-s", "60", "--storage", "own", "--state-bytes", "1GB"], "--gpus"),
        (["--gpus", "8", "--state-bytes", "1GB"], "--storage shared or own"),
        (["--gpus", "8", "--failing", "node=1"], "--storage shared or own"),
        (["--mtbf-s", "60", "--rank-costs", "x.jsonl"], "--gpus"),
        (["--gpus", "8", "--rank-costs", "no/such/file"], "no/such/file"),
        (
            ["--gpus", "8", "--mtbf-s", "60", "--storage", "own", "--state-bytes", "1",
             "--failing", "node=1"],
            "--failing and --mtbf-s",
        ),
        (
            ["--gpus", "8", "--storage", "own", "--state-bytes", "1", "--failing", "node=-1"],
            "failures of a node",
        ),
        (
            ["--gpus", "8", "--storage", "own", "--state-bytes", "1", "--gpus-per-node", "0"],
            "gpus_per_node",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_a_sentence(
    given: list[str], said: str, capsys: Capture
) -> None:
    assert main([*RUN, *given]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--failing", "gpu=1"], "process, reboot, node, rack"),
        (["--failing", "node"], "process, reboot, node, rack"),
        (["--reading", "shared=fast"], "memory, local, shared"),
    ],
)
def test_names_and_numbers_of_an_option_are_checked(
    given: list[str], said: str, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*CLUSTER, *given])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
