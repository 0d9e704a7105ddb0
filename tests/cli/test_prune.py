"""``checkfreq prune``: what it removes, what it says, and when it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from checkfreq.cli import main
from checkfreq.persist.lock import DirectoryLock
from checkfreq.store.store import CheckpointStore

Write = Callable[[int], Path]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def chk(write: Write, store: CheckpointStore) -> CheckpointStore:
    """Steps 10, 20, ... 60, all of one instant; 20 has the lowest loss, 50 the highest."""
    for step in range(10, 70, 10):
        write(step)
    for step, loss in ((10, 0.5), (20, 0.1), (50, 0.9), (60, float("nan"))):
        store.add_mark(step, metrics={"loss": loss})
    store.add_mark(30, at_epoch_end=True)
    return store


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--last", "2"], [50, 60]),
        (["--last", "1", "--best", "loss"], [20, 60]),
        (["--best", "loss:max"], [50, 60]),
        (["--every-steps", "20"], [20, 40, 60]),
        (["--epochs"], [30, 60]),
        (["--every-hours", "1", "--for-hours", "2"], [10, 60]),
        (["--last", "5", "--within", "120B"], [40, 50, 60]),
        ([], [10, 40, 50, 60]),
    ],
)
def test_what_no_option_keeps_is_removed(
    chk: CheckpointStore, options: list[str], left: list[int], capsys: Capture
) -> None:
    assert main(["prune", str(chk.root), *options]) == 0
    assert chk.steps() == left
    *lines, total = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"step {step}: {'kept' if step in left else 'removed'}" for step in range(10, 70, 10)
    ]
    assert total == f"{6 - len(left)} removed, {len(left)} kept"


def test_a_dry_run_changes_nothing_and_works_beside_a_run(
    chk: CheckpointStore, capsys: Capture
) -> None:
    with locked(chk):
        before = sorted(os.listdir(chk.root))
        assert main(["prune", str(chk.root), "--last", "1", "--dry-run"]) == 0
        assert sorted(os.listdir(chk.root)) == before
    out = capsys.readouterr().out
    assert "step 10: would be removed, 40 B, of 2027-01-15" in out
    assert "step 60: kept" in out


class locked:  # reads as what it does
    """The lock of a run, held."""

    def __init__(self, chk: CheckpointStore) -> None:
        self._lock = DirectoryLock(chk.root)

    def __enter__(self) -> None:
        self._lock.acquire(
            timeout_s=5.0, owner_pid=1, on_wait=lambda holder: None, give_up=lambda s: False
        )

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_pinned_ones_and_those_that_cannot_be_read_stay(chk: CheckpointStore) -> None:
    chk.add_mark(20, keep=True)
    (chk.path(30) / "manifest.json").write_text("damaged")
    assert main(["prune", str(chk.root), "--last", "1"]) == 0
    assert chk.steps() == [20, 30, 60]


def test_the_last_valid_one_stays_whatever_the_newest_looks_like(chk: CheckpointStore) -> None:
    (chk.path(60) / "model.safetensors").write_bytes(b"")
    assert main(["prune", str(chk.root), "--last", "1"]) == 0
    assert chk.steps() == [50, 60]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--for-hours", "2"], "expected --every-hours with it"),
        (["--last", "0"], "expected at least 1 checkpoint, got 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    chk: CheckpointStore, options: list[str], message: str, capsys: Capture
) -> None:
    assert main(["prune", str(chk.root), *options]) == 2
    assert message in capsys.readouterr().err
    assert len(chk.steps()) == 6
