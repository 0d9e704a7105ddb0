"""``checkfreq log``: events as a story, for people and as JSON."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkfreq.cli import main
from tests.cli.golden import compare

ROOT = Path(__file__).resolve().parents[2]
START_S = 1_790_000_000.0

Capture = pytest.CaptureFixture[str]


def event(kind: str, step: int, at_s: float, **data: object) -> dict[str, Any]:
    return {"time_unix_s": START_S + at_s, "kind": kind, "step": step, **data}


def saved(step: int, at_s: float, reason: str = "periodic") -> dict[str, Any]:
    return event(
        "committed",
        step,
        at_s,
        reason=reason,
        num_bytes=3 << 20,
        linked_bytes=1 << 20,
        stall_s=0.0125,
        persist_s=2.5,
        durable_monotonic_s=at_s,
        costs={"iteration_s": 0.5, "interval_steps": 40, "measured_overhead": 0.02},
    )


def planned(step: int, at_s: float, interval: int, cost_s: float) -> dict[str, Any]:
    explanation = f"every {interval} iterations: bound by the overhead budget"
    return event(
        "plan", step, at_s, explanation=explanation, interval_steps=interval, cost_s=cost_s
    )


#: Two runs: one that was killed, and one that went on from the checkpoint before the newest.
STORY = [
    event("began", 0, 0.0, host="node-a", world=4, max_overhead=0.035),
    saved(10, 5.0),
    planned(12, 6.0, 40, 0.5),
    planned(30, 15.0, 80, 1.0),
    *(saved(step, step / 2) for step in (40, 80, 120, 160)),
    event("deferred", 200, 99.0, why="the previous checkpoint is not durable yet"),
    event("pruned", 40, 100.0, steps=[40, 80]),
    event("failed", 200, 110.0, error="No space left", steps_at_risk=50),
    event("restored", 120, 300.0, steps_lost=40, source="directory"),
    event("quarantined", 160, 300.0, reason="digest of tensor w"),
    event("surprise", 121, 301.0, size=7),
    saved(121, 302.0, "requested"),
    event("ended", 121, 303.0, how="finished"),
]


def written(folder: Path, events: list[dict[str, Any]]) -> Path:
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
    return folder


def told(capsys: Capture, *argv: object) -> list[str]:
    """The lines without their times."""
    assert main(["log", *map(str, argv)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line[23:] if line.startswith("  2026-") else line for line in lines]


def test_events_are_told_run_by_run(tmp_path: Path, capsys: Capture) -> None:
    compare("log", told(capsys, written(tmp_path, STORY)))


def test_all_checkpoints_and_the_last_runs_alone(tmp_path: Path, capsys: Capture) -> None:
    lines = told(capsys, written(tmp_path, STORY), "--all", "--last", "1")
    assert lines[0] == "run 2"
    assert len(lines) == 6
    lines = told(capsys, tmp_path, "--all", "--last", "9")
    assert "step 120 saved" in "".join(lines)
    assert "step 200 put off: the previous checkpoint is not durable yet" in lines
    assert "removed, as retention says: steps 40, 80" in lines


def test_json_is_every_event_with_its_run_and_what_is_told(tmp_path: Path, capsys: Capture) -> None:
    assert main(["log", "--json", str(written(tmp_path, STORY))]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["kind"] for row in rows] == [one["kind"] for one in STORY]
    assert {row["run"] for row in rows[:11]} == {1}
    assert {row["run"] for row in rows[11:]} == {2}
    assert rows[10] == {**STORY[10], "run": 1, "told": "step 200 NOT saved: No space left"}


def test_every_kind_has_a_sentence(tmp_path: Path, capsys: Capture) -> None:
    page = (ROOT / "docs" / "format.md").read_text().split("## Events")[1]
    kinds = [
        word
        for word in page.split("The kinds")[1].split("Fields")[0].split("`")[1::2]
        if "." not in word
    ]
    assert len(kinds) > 15
    lines = told(capsys, written(tmp_path, [event(kind, 3, 1.0) for kind in kinds]), "--all")
    assert [line for line in lines if "(step 3)" in line] == []
    assert [line for line in lines if "{" in line] == []


def test_what_is_added_is_told_while_it_follows(tmp_path: Path) -> None:
    written(tmp_path, STORY[:3])
    command = [sys.executable, "-u", "-m", "checkfreq.cli", "log", "--follow", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        assert following.stdout.readline() == "run 1\n"
        assert [following.stdout.readline().split()[2] for _ in range(3)]
        with (tmp_path / "events.jsonl").open("a") as events:
            events.write(f"{json.dumps(STORY[3])}\n")
        assert "it was every 40" in following.stdout.readline()
        following.send_signal(signal.SIGINT)
        assert following.wait(60) == 130
        assert following.stderr.read() == "checkfreq: interrupted\n"
