"""events.jsonl and events.1.jsonl, as they are read again and again."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from checkfreq.errors import StorageError
from checkfreq.events import Event, EventLog
from checkfreq.store.fileops import LocalFileOps
from checkfreq.story.reading import EventReader
from tests.story.made import event, write


def steps(reader: EventReader) -> list[int]:
    return [one["step"] for one in reader.new()]


def test_the_older_file_comes_first(tmp_path: Path) -> None:
    write(tmp_path, [event("plan", 1, 1.0)], name="events.1.jsonl")
    write(tmp_path, [event("plan", 2, 2.0)])
    assert steps(EventReader(tmp_path)) == [1, 2]


def test_only_new_lines_are_read_the_next_time(tmp_path: Path) -> None:
    write(tmp_path, [event("plan", 1, 1.0)])
    reader = EventReader(tmp_path)
    assert steps(reader) == [1]
    assert steps(reader) == []
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(event("plan", 2, 2.0)) + '\n{"kind": "pl')
    assert steps(reader) == [2]
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('an", "step": 3}\n')
    assert steps(reader) == [3]


@pytest.mark.parametrize("look_every", [1, 3])
def test_no_event_is_missed_or_read_twice_while_files_turn_over(
    tmp_path: Path, look_every: int
) -> None:
    log = EventLog(tmp_path / "events.jsonl", LocalFileOps(tmp_path), max_bytes=600)
    reader, found = EventReader(tmp_path), []
    for step in range(60):
        log.append(Event("plan", step, {"explanation": "x" * 20}))
        if step % look_every == 0:
            found += steps(reader)
    found += steps(reader)
    assert found == list(range(60))


def test_lines_that_are_no_json_objects_are_counted_and_skipped(tmp_path: Path) -> None:
    good = json.dumps(event("plan", 1, 1.0))
    (tmp_path / "events.jsonl").write_text(f"{good}\n\x00\n[1]\n{good[:9]}\n{good}\n{'[' * 9999}\n")
    reader = EventReader(tmp_path)
    assert steps(reader) == [1, 1]
    assert reader.num_skipped == 4


def test_a_line_that_is_no_event_by_its_length_is_skipped_and_takes_no_memory(
    tmp_path: Path,
) -> None:
    num_bytes = 40_000_000
    good = json.dumps(event("plan", 1, 1.0)).encode() + b"\n"
    path = tmp_path / "events.jsonl"
    path.write_bytes(good + b'{"kind": "' + b"x" * num_bytes)
    reader = EventReader(tmp_path)
    tracemalloc.start()
    try:
        assert steps(reader) == [1]
        assert steps(reader) == []
        with path.open("ab") as file:  # the line ends, and others come
            file.write(b'"}\n' + good + good[:9])
        assert steps(reader) == [1]
        with path.open("ab") as file:
            file.write(good[9:])
        assert steps(reader) == [1]
        assert tracemalloc.get_traced_memory()[1] < 35_000_000
    finally:
        tracemalloc.stop()
    assert reader.num_skipped == 1


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    os.symlink("/etc/passwd", tmp_path / "events.jsonl")
    with pytest.raises(StorageError, match="a symbolic link"):
        EventReader(tmp_path).new()
