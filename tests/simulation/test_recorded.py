"""Reading a trace: what was written comes back; damage and lies get an error that says where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkfreq.errors import ConfigError, NoCheckpointError
from checkfreq.pacing.trace import MARK, NAME, UNIT_S, TraceLog
from checkfreq.policy.observations import Iteration, Measured
from checkfreq.simulation.recorded import read_trace
from checkfreq.store.fileops import LocalFileOps
from tests.simulation.made import HEADER, Clock, write_trace

WORK = [0.02 + 0.001 * (at % 3) for at in range(60)]
AT = (5, 25, 45)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewritten(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def changed(path: Path, kind: str, **fields: object) -> Path:
    """The trace with other fields in its first line that has ``kind``; None removes one."""
    lines = lines_of(path)
    line = next(line for line in lines if kind in line)
    line |= fields
    for name in [name for name, value in fields.items() if value is None]:
        del line[name]
    return rewritten(path, lines)


def test_every_time_comes_back_to_the_unit(tmp_path: Path) -> None:
    clock = Clock()
    log = TraceLog(tmp_path / NAME, LocalFileOps(tmp_path, direct=False), clock=clock)
    log.begin(**HEADER, interval_steps=7, dynamic=False)
    clock.now_s += 10.0
    log.add(Iteration(5000.0, 5001.25, 0.25), counts=False)
    log.paid(0.125)
    log.add(
        Iteration(5001.25, 5003.0, 0.5, 0.1, False, False, waited_s=0.25, met_s=0.125), counts=True
    )
    log.started("a", step=2, start_s=5001.25, reason="periodic", planned=None)
    log.started("b", step=3, start_s=5002.0, reason="requested", planned=8)
    log.uploading(5002.5, None)
    log.ended("b", end_s=5002.5, stall_s=0.0, measured=None)
    log.ended("a", end_s=5003.5, stall_s=0.5, measured=Measured(0.25, 1.5, 2.25, 99))
    log.ended("unknown", end_s=1.0, stall_s=0.0, measured=None)
    log.uploading(5002.5, 5004.0)
    log.write()
    run = read_trace(tmp_path)
    assert (run.interval_steps, run.dynamic, run.num_slots, run.cached) == (7, False, 2, None)
    assert run.start_s == pytest.approx([0.0, 1.25], abs=UNIT_S)
    assert run.took_s == pytest.approx([1.25, 1.75], abs=UNIT_S)
    assert run.held_s == pytest.approx([0.25, 0.5], abs=UNIT_S)
    assert (run.uncounted, run.irregular, run.busy) == ({0}, {1}, {1})
    assert (run.waited_s, run.met_s, run.paid_s) == ({1: 0.25}, {1: 0.125}, {1: 0.125})
    failed, durable = run.checkpoints
    assert (failed.step, failed.reason, failed.has_failed) == (3, "requested", True)
    assert (failed.planned_steps, durable.planned_steps) == (8, None)
    assert (durable.step, durable.state_bytes, durable.has_failed) == (2, 99, False)
    assert (durable.copy_s, durable.persist_s, durable.stall_s) == (0.25, 1.5, 0.5)
    assert (durable.start_s, durable.end_s) == (1.25, 3.5)
    assert run.uploads == [(2.5, 4.0)]


def test_files_are_bounded_and_what_is_left_is_one_run(tmp_path: Path) -> None:
    clock = Clock()
    ops = LocalFileOps(tmp_path, direct=False)
    log = TraceLog(tmp_path / NAME, ops, clock=clock, max_bytes=4096)
    log.begin(**HEADER)
    for number in range(2000):
        log.add(Iteration(clock.now_s, clock.now_s + 0.01), counts=True)
        clock.now_s += 0.01
        if number % 50 == 49:
            log.write()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() <= {NAME, "trace.1.jsonl"}
    assert max(sizes.values()) < 4096 + 1500
    run = read_trace(tmp_path)
    assert 200 < run.num_iterations < 2000
    last_s = run.start_s[-1] + run.took_s[-1]
    assert last_s == pytest.approx(20.0, abs=1e-3)
    assert run.took_s == pytest.approx([0.01] * run.num_iterations, abs=UNIT_S)


# ---- torn


def test_a_torn_tail_is_left_out_and_counted(tmp_path: Path) -> None:
    path = write_trace(tmp_path, WORK, at=AT)
    whole = read_trace(path)
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    torn = read_trace(path)
    assert torn.num_torn == 1
    assert len(torn.checkpoints) == len(whole.checkpoints) - 1
    assert torn.took_s == whole.took_s


# ---- refused


def test_a_directory_without_a_trace_says_how_to_record_one(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match=r"CFConfig\(record_trace=True\)"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (MARK, {MARK: 2}, "line 1: expected a trace of version 1, found 2: a newer"),
        (MARK, {"max_overhead": 2}, "max_overhead: expected a fraction between 0 and 1, got 2.0"),
        (MARK, {"cached": {"x": 1}}, "Profile: expected exactly its fields"),
        ("took", {"took": [1]}, "line 2: expected as many times in held as in took, found 60"),
        ("checkpoint", {"durable": None}, "line 3: durable: expected a whole number >= 0, got N"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_a_run_does_not_write_is_named_with_its_line(
    tmp_path: Path, kind: str, fields: dict[str, Any], said: str
) -> None:
    path = changed(write_trace(tmp_path, WORK, at=AT), kind, **fields)
    with pytest.raises(ConfigError, match=said):
        read_trace(path)
