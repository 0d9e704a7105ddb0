"""``checkfreq pin``, ``unpin`` and ``quarantine``: what they change, and when they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from checkfreq.cli import main
from checkfreq.store.store import CheckpointStore
from tests.cli.test_prune import locked

Write = Callable[[int], Path]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def chk(write: Write, store: CheckpointStore) -> CheckpointStore:
    """Steps 1 to 6; 2 has the lowest loss."""
    for step in range(1, 7):
        write(step)
        store.add_mark(step, metrics={"loss": abs(step - 2) + 0.5})
    return store


def test_a_pinned_checkpoint_survives_pruning_until_it_is_unpinned(
    chk: CheckpointStore, capsys: Capture
) -> None:
    assert main(["pin", str(chk.root), "step-00000001/", "best:loss", "2"]) == 0
    assert capsys.readouterr().out == "step 1: pinned\nstep 2: pinned\n"
    assert main(["prune", str(chk.root), "--last", "1"]) == 0
    assert chk.steps() == [1, 2, 6]
    assert main(["unpin", str(chk.root), "1"]) == 0
    assert main(["prune", str(chk.root), "--last", "1"]) == 0
    assert chk.steps() == [2, 6]
    assert chk.marks()[2].metrics == {"loss": 0.5}


@pytest.mark.parametrize("verb", ["pin", "unpin"])
def test_all_steps_are_changed_or_none(verb: str, chk: CheckpointStore, capsys: Capture) -> None:
    before = chk.marks()
    assert main([verb, str(chk.root), "3", "9"]) == 1
    assert "has no step 9; it has: 1, 2, 3, 4, 5, 6" in capsys.readouterr().err
    assert chk.marks() == before


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        (["prune", "--last", "1"], "is in use"),
        (["pin", "3"], "cp -al "),
        (["unpin", "3"], "Do it once the run has ended"),
        (["quarantine", "3", "--reason", "odd"], "restore(step=N)"),
    ],
)
def test_beside_a_run_they_say_what_to_do_instead(
    command: list[str], advice: str, chk: CheckpointStore, capsys: Capture
) -> None:
    before = {path: path.stat().st_mtime_ns for path in chk.root.rglob("*")}
    with locked(chk):
        (chk.root / ".lock").touch()
        assert main([command[0], str(chk.root), *command[1:]]) == 2
    error = capsys.readouterr().err
    assert "is in use (still locked by" in error
    assert advice in error
    after = {path: path.stat().st_mtime_ns for path in chk.root.rglob("*")}
    assert {path for path in after if after[path] != before.get(path)} <= {
        chk.root / ".lock",
        chk.root,
    }
    assert chk.steps() == [1, 2, 3, 4, 5, 6]


def test_a_quarantined_checkpoint_is_kept_aside_with_its_reason(
    chk: CheckpointStore, capsys: Capture
) -> None:
    assert main(["quarantine", str(chk.root), "6", "--reason", "loss\x1b is NaN"]) == 0
    path = chk.root / "quarantine" / "step-00000006"
    assert capsys.readouterr().out == f"step 6 is in {path}\nnewest that is left: step 5\n"
    assert (path / "manifest.json").exists()
    assert path.with_name("step-00000006.reason.txt").read_text() == "loss\x1b is NaN\n"
    assert chk.steps() == [1, 2, 3, 4, 5]
    (line,) = (chk.root / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert (event["kind"], event["step"], event["by"]) == ("quarantined", 6, "user")
    path.rename(chk.root / "step-00000006")  # as the help says
    assert main(["verify", str(chk.root), "6"]) == 0
