"""Reading a trace: what was written comes back; damage and lies get an error that says where."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkfreq.errors import CheckFreqError, ConfigError, NoCheckpointError, StorageError
from checkfreq.pacing.trace import MARK, NAME, UNIT_S, TraceLog
from checkfreq.policy.observations import Iteration, Measured
from checkfreq.simulation.recorded import read_trace
from checkfreq.simulation.retrace import as_recorded, auto, ideal_interval, policy_of
from checkfreq.simulation.series import take_apart
from checkfreq.store.fileops import LocalFileOps
from tests.simulation.made import HEADER, Clock, recorded, write_trace

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


def test_a_gap_in_the_times_is_kept(tmp_path: Path) -> None:
    log = TraceLog(tmp_path / NAME, LocalFileOps(tmp_path, direct=False), clock=Clock())
    log.begin(**HEADER)
    for start_s in (5000.0, 5001.0, 5005.0):
        log.add(Iteration(start_s, start_s + 1.0), counts=True)
    log.write()
    assert read_trace(tmp_path).start_s == pytest.approx([0.0, 1.0, 5.0], abs=UNIT_S)


def test_a_clock_that_steps_back_leaves_iterations_in_order(tmp_path: Path) -> None:
    log = TraceLog(tmp_path / NAME, LocalFileOps(tmp_path, direct=False), clock=Clock())
    log.begin(**HEADER)
    for start_s in (5000.0, 5000.5):
        log.add(Iteration(start_s, start_s + 1.0), counts=True)
        log.write()
    assert read_trace(tmp_path).start_s == pytest.approx([0.0, 1.0], abs=UNIT_S)


def test_times_that_are_none_are_left_out(tmp_path: Path) -> None:
    log = TraceLog(tmp_path / NAME, LocalFileOps(tmp_path, direct=False), clock=Clock())
    log.begin(**HEADER)
    log.started("a", step=1, start_s=math.nan, reason="periodic", planned=None)
    log.ended("a", end_s=math.inf, stall_s=math.nan, measured=None)
    for iteration in (Iteration(math.nan, 1.0), Iteration(3.0, 2.0), Iteration(5000.0, 5001.0)):
        log.add(iteration, counts=True)
    log.write()
    run = read_trace(tmp_path)
    assert run.num_iterations == 1
    assert run.checkpoints[0].durable_s == 0.0


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


def test_iterations_are_written_without_any_checkpoint(tmp_path: Path) -> None:
    log = TraceLog(tmp_path / NAME, LocalFileOps(tmp_path, direct=False), clock=Clock())
    log.begin(**HEADER)
    for number in range(5000):
        log.add(Iteration(5000.0 + number, 5001.0 + number), counts=True)
    assert read_trace(tmp_path).num_iterations >= 4096


def test_a_directory_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "missing"
    write_trace(folder, WORK, at=AT)
    log = TraceLog(folder / NAME, LocalFileOps(folder, direct=False), clock=Clock())
    log.begin(**HEADER)
    for start_s in (5000.0, 5001.0):
        log.add(Iteration(start_s, start_s + 1.0), counts=True)
        log.write()
    assert caplog.text.count("iteration times are not being recorded in") == 2  # one for each log


def test_of_several_runs_the_longest_is_read(tmp_path: Path) -> None:
    for num in (20, 60, 30):
        write_trace(tmp_path, WORK[:num], at=(5,))
    assert read_trace(tmp_path).num_iterations == 60


def test_a_compressed_file_is_read_like_any_other(tmp_path: Path) -> None:
    path = write_trace(tmp_path, WORK, at=AT)
    packed = tmp_path / "some.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(packed).took_s == read_trace(path).took_s


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


def test_a_run_that_follows_a_torn_one_is_read(tmp_path: Path) -> None:
    path = write_trace(tmp_path, WORK[:30], at=(5,))
    path.write_bytes(path.read_bytes()[:-20])
    write_trace(tmp_path, WORK, at=AT)  # ends the torn line first
    run = read_trace(path)
    assert (run.num_iterations, run.num_torn) == (60, 0)


def test_wherever_a_file_ends_it_is_read_or_said_to_be_empty(tmp_path: Path) -> None:
    path = write_trace(tmp_path, WORK, at=AT)
    data = path.read_bytes()
    first, second = data.index(b"\n") + 1, data.index(b"\n", data.index(b"took")) + 1
    for end in range(0, len(data), 7):
        path.write_bytes(data[:end])
        if end >= second - 1:
            assert read_trace(path).num_iterations == 60
            continue
        said = "expected a JSON object" if 0 < end < first - 1 else "expected a trace with iter"
        with pytest.raises(ConfigError, match=said):
            read_trace(path)


# ---- refused


def test_a_directory_without_a_trace_says_how_to_record_one(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match=r"CFConfig\(record_trace=True\)"):
        read_trace(tmp_path)


def test_a_missing_file_and_a_link_are_storage_errors(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read the trace"):
        read_trace(tmp_path / "missing.jsonl")
    write_trace(tmp_path, WORK)
    os.symlink(tmp_path / NAME, tmp_path / "link.jsonl")
    with pytest.raises(StorageError, match="found a symbolic link, which is not followed"):
        read_trace(tmp_path / "link.jsonl")


def test_a_newer_version_says_who_can_read_it(tmp_path: Path) -> None:
    path = changed(write_trace(tmp_path, WORK), MARK, **{MARK: 2})
    with pytest.raises(
        ConfigError, match=r"line 1: expected a trace of version 1, found 2: a newer"
    ):
        read_trace(path)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (MARK, {MARK: "1"}, "line 1: checkfreq_trace: expected a version, got '1'"),
        (MARK, {MARK: True}, "expected a version, got True"),
        (MARK, {"unit_s": 0}, "unit_s: expected 1e-9 to 1 second, got 0.0"),
        (MARK, {"unit_s": "x"}, "unit_s: expected a number >= 0, got 'x'"),
        (MARK, {"run": None}, "run: expected a text, got None"),
        (MARK, {"max_overhead": 2}, "max_overhead: expected a fraction between 0 and 1, got 2.0"),
        (MARK, {"objective": []}, r"objective: expected bound or goodput, got \[\]"),
        (MARK, {"origin": {"machine": 1}}, "origin: expected texts by name"),
        (MARK, {"cached": 3}, "cached: expected a profile, got 3"),
        (MARK, {"cached": {"x": 1}}, "Profile: expected exactly its fields"),
        (MARK, {"from_step": -1}, "from_step: expected a whole number from 0"),
        (MARK, {"mtbf_s": float("inf")}, "mtbf_s: expected a number >= 0, got inf"),
        ("took", {"took": 5}, "line 2: took: expected a list, got 5"),
        ("took", {"took": [1]}, "expected as many times in held as in took, found 60 and 1"),
        ("took", {"took": [0] * 60}, "took: expected times > 0"),
        ("took", {"took": [10**400] * 60}, "took: expected a whole number >= 0, got 1000"),
        ("took", {"took": [1.5] * 60}, "took: expected a whole number >= 0, got 1.5"),
        ("took", {"held": [-1] * 60}, "held: expected a whole number >= 0, got -1"),
        ("took", {"at": None}, "at: expected a whole number, got None"),
        ("took", {"busy": [60]}, "busy: expected a whole number from 0 to 59, got 60"),
        ("took", {"met": [3]}, "met: expected pairs, got 3"),
        ("took", {"waited": [[1, -2]]}, "waited: expected a whole number >= 0, got -2"),
        ("checkpoint", {"checkpoint": "7"}, "line 3: checkpoint: expected a whole number"),
        ("checkpoint", {"durable": None}, "durable: expected a whole number >= 0, got None"),
        ("checkpoint", {"planned": 2.5}, "planned: expected a whole number"),
        ("checkpoint", {"checkpoint": None}, "expected iterations, a checkpoint or an upload"),
        ("checkpoint", {"checkpoint": None, "upload": 3}, "upload: expected two numbers"),
    ],
)
def test_what_a_run_does_not_write_is_named_with_its_line(
    tmp_path: Path, kind: str, fields: dict[str, Any], said: str
) -> None:
    path = changed(write_trace(tmp_path, WORK, at=AT), kind, **fields)
    with pytest.raises(ConfigError, match=said):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "expected a trace with iterations, found none"),
        (b"hello\n", "line 1: expected a JSON object"),
        (b"\n\n[1]\n", "line 3: expected a JSON object"),
        (b'{"took": [1], "held": [1]}\n', "line 1: expected a header with checkfreq_trace"),
        (b"[" * 100_000 + b"\n", "line 1: expected a JSON object"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_trace(path)


def test_what_is_compressed_is_bounded_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(bytes((64 << 20) + 1), 9))
    with pytest.raises(ConfigError, match="expected at most 67108864 bytes unpacked, found more"):
        read_trace(path)
    path.write_bytes(b"not compressed")
    with pytest.raises(ConfigError, match="expected a file compressed by gzip"):
        read_trace(path)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_trace_with_any_value_anywhere_is_replayed_or_refused(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = write_trace(tmp_path, WORK, at=AT)
    lines = lines_of(path)
    path.unlink()
    line = data.draw(st.sampled_from(lines))
    name = data.draw(st.sampled_from(sorted(line)))
    value = data.draw(_VALUES)
    if isinstance(line[name], list) and data.draw(st.booleans()):
        line[name][data.draw(st.integers(0, len(line[name]) - 1))] = value
    else:
        line[name] = value
    rewritten(path, lines)
    try:
        series = take_apart(read_trace(path))
    except CheckFreqError:
        return
    finally:
        path.unlink()
    auto(series, policy_of(series))
    as_recorded(series)
    ideal_interval(series, max_overhead=0.035)


def test_a_recording_counts_its_iterations(tmp_path: Path) -> None:
    assert recorded(tmp_path, WORK).num_iterations == len(WORK)
