"""The file of events: short, complete at its end, and readable whatever happened to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab.events import events
from checkfreq.events import Event, EventLog, older_generation
from checkfreq.store.fileops import LocalFileOps


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_line_is_json_for_readers_that_know_no_nan_and_leaves_out_what_is_not_known() -> None:
    costs = {"T": float("nan"), "W": None}
    data = {"mtbf_s": None, "costs": costs, "more": [{"at": float("-inf")}, None]}
    event = Event("plan", 3, data)
    line = json.loads(event.to_json(), parse_constant=pytest.fail)
    del line["time_unix_s"]
    assert line == {
        "kind": "plan",
        "step": 3,
        "costs": {"T": "nan"},
        "more": [{"at": "-inf"}, None],
    }
    assert event.data["mtbf_s"] is None


def test_a_thousand_events_take_two_files_of_bounded_size_and_the_newest_are_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, LocalFileOps(tmp_path), max_bytes=4096)
    for step in range(1_000):
        log.append(Event("committed", step))
        assert path.stat().st_size <= 4096 if path.exists() else older_generation(path).exists()
    assert sorted(os.listdir(tmp_path)) == ["events.1.jsonl", "events.jsonl"]
    assert older_generation(path).stat().st_size < 4096 + 200
    found = steps_in(older_generation(path)) + steps_in(path)
    assert found == list(range(found[0], 1_000))
    assert [event["step"] for event in events(tmp_path, "committed")] == found
    assert events(tmp_path, "committed", last_bytes=300)[-1]["step"] == 999


def test_a_kill_between_two_files_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, LocalFileOps(tmp_path), max_bytes=1).append(
        Event("committed", 1)
    )  # renamed, and nothing came after
    assert not path.exists()
    assert [e["step"] for e in events(tmp_path, "committed", last_bytes=1000)] == [1]
    EventLog(path, LocalFileOps(tmp_path), max_bytes=1000).append(Event("committed", 2))
    assert [event["step"] for event in events(tmp_path, "committed")] == [1, 2]


CUT_OFF = """
import resource, signal, sys
from pathlib import Path
from checkfreq.events import Event, EventLog
from checkfreq.store.fileops import LocalFileOps
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
log = EventLog(path, LocalFileOps(path.parent))
log.append(Event("committed", 1))
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
size = path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
log.append(Event("failed", 2))
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
log.append(Event("committed", 3))
"""


def test_a_line_cut_off_by_a_full_disk_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    """In a process of its own, since the limit that stands for a full disk is a process's."""
    path = tmp_path / "events.jsonl"
    subprocess.run([sys.executable, "-c", CUT_OFF, str(path)], check=True)
    whole, torn, after = path.read_text().splitlines()
    assert json.loads(whole)["step"] == 1
    assert len(torn) == 10
    assert json.loads(after)["step"] == 3
    assert [event["step"] for event in events(tmp_path, "committed")] == [1, 3]
