"""The traces that are committed, of real runs under real loads: the policy over each of them.

A complaint becomes a test: record a trace with ``CFConfig(record_trace=True)``, put it there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from checkfreq.simulation.recorded import read_trace
from checkfreq.simulation.retrace import as_recorded, auto, ideal_interval, policy_of
from checkfreq.simulation.series import take_apart

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "traces" / "recorded"
TRACES = sorted(FOLDER.glob("*.jsonl.gz"))
MOST_BYTES = 100_000
#: The others are replayed in test-more.
QUICK = ("throttled", "slow-disk", "loader")
#: AUTO's interval over the smallest fixed one that keeps the bound, and its overhead over the
#: bound: far above what is aimed at, to notice that something broke.
MOST_OF_IDEAL = 3.0
MOST_OF_BOUND = 1.25


def name_of(path: Path) -> str:
    return path.name.removesuffix(".jsonl.gz")


@pytest.mark.parametrize("path", TRACES, ids=name_of)
def test_a_trace_is_small_and_says_where_it_is_from(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES
    run = read_trace(path)
    assert run.num_torn == 0
    assert {
        "machine",
        "versions",
        "commit",
        "date",
        "command",
        "scene",
        "load average before",
    } <= (run.origin.keys())


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if name_of(path) in QUICK else pytest.mark.more)
        for path in TRACES
    ],
    ids=name_of,
)
def test_auto_stays_near_the_ideal_interval_and_its_bound(path: Path) -> None:
    series = take_apart(read_trace(path))
    policy = policy_of(series)
    done = auto(series, policy)
    ideal = ideal_interval(series, max_overhead=policy.max_overhead)
    assert ideal is not None
    assert done.interval_steps is not None
    assert done.interval_steps <= MOST_OF_IDEAL * ideal
    assert done.overhead <= MOST_OF_BOUND * policy.max_overhead
    whole_s = sum(series.recording.took_s)
    recorded = as_recorded(series)
    assert recorded.work_s + recorded.added_s == pytest.approx(whole_s, rel=0.1)
