"""Processes of a node take turns, and go on without where that does not work."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path

import pytest

from checkfreq.snapshot.node_turns import NodeTurns

#: Only a defect reaches it.
DEADLINE_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def test_whoever_waits_too_long_goes_on_without_and_waits_no_more(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with NodeTurns(path).turn(threading.Event()), caplog.at_level(logging.INFO):
        turns = NodeTurns(path, patience_s=0.0)
        for _ in range(2):
            with turns.turn(threading.Event()):
                pass
    (record,) = caplog.records
    assert "another process has held it for 0 s" in record.getMessage()


def test_in_a_hurry_nobody_waits(path: Path) -> None:
    """Also after an error in the turn, which ends it."""
    hurry = threading.Event()
    with contextlib.suppress(KeyError), NodeTurns(path).turn(threading.Event()):
        waiting = threading.Thread(target=lambda: _turn(path, hurry))
        waiting.start()
        hurry.set()
        waiting.join(DEADLINE_S)
        assert not waiting.is_alive()
        _turn(path, hurry)
        raise KeyError
    _turn(path, threading.Event())


def _turn(path: Path, hurry: threading.Event) -> None:
    with NodeTurns(path, patience_s=10 * DEADLINE_S).turn(hurry):
        pass


@pytest.mark.parametrize("spoil", ["folder", "link"])
def test_where_the_file_cannot_be_had_there_are_no_turns(path: Path, spoil: str) -> None:
    victim = path.with_name("victim")
    path.mkdir() if spoil == "folder" else path.symlink_to(victim)
    with NodeTurns(path).turn(threading.Event()):
        pass
    assert not victim.exists()
