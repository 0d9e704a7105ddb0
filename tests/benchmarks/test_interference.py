"""The trace of the interference benchmark: emitted as lines, drawn from them alone."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.interference import plot as interference
from benchmarks.interference import table as table
from benchmarks.interference.measure import Recorder, Trace
from benchmarks.lab.estimate import Sample, Stretch
from benchmarks.lab.paired import Window
from benchmarks.lab.plots import save
from tests.benchmarks.test_benchmarks_run import TINY_WINDOWS, lines_of
from tests.benchmarks.test_tables import HOW

PHASES = ["alone", "second load", "alone again"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    short = ("--settle", "0", "--phase", "0.1", "--stretch", "0.1", "--clean", "0.1")
    folder = tmp_path_factory.mktemp("interference")
    return lines_of("interference", *TINY_WINDOWS, *short, folder=folder)


def test_it_prints_a_line_per_arm_and_phase_and_a_trace_per_arm(
    lines: list[dict[str, object]],
) -> None:
    in_phases = [line for line in lines if "phase" in line]
    assert [(line["arm"], line["phase"]) for line in in_phases] == [
        (arm, phase) for arm in ("static", "adaptive") for phase in PHASES
    ]
    static = [line for line in in_phases if line["arm"] == "static"]
    assert len({line[end] for line in static for end in ("k_start", "k_end")}) == 1
    traces = [line for line in lines if line.get("trace")]
    assert [trace["arm"] for trace in traces] == ["static", "adaptive"]
    for trace in traces:
        assert [name for name, _, _ in trace["phases"]] == PHASES  # type: ignore[attr-defined]
        assert len(trace["overheads"]) >= len(PHASES)  # type: ignore[arg-type]
        rows = [line for line in in_phases if line["arm"] == trace["arm"]]
        intervals = [k for _, k in trace["intervals"]]  # type: ignore[attr-defined]
        assert (intervals[0], intervals[-1]) == (rows[0]["k_start"], rows[-1]["k_end"])
    assert table.interference(lines).count("\n| ") == len(in_phases)


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
def test_the_lines_draw_the_same_picture_every_time(
    lines: list[dict[str, object]], tmp_path: Path
) -> None:
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    for path in (first, second):
        figure = interference.draw(lines)
        assert figure is not None
        save(figure, path)
    assert first.read_bytes() == second.read_bytes()
    for words in ("adaptive", "static", "second load", "bound 3.5 %"):
        assert f">{words}</text>" in first.read_text()


class FakeManager:
    """Its interval is the number of its checkpoints."""

    def __init__(self) -> None:
        self.k = 4

    def stats(self) -> dict[str, Any]:
        return {"interval_steps": self.k, "num_committed": self.k, "num_deferred": 0}


class FakeLive:
    """Each stretch passes two boundaries, and tunes at the second."""

    def __init__(self) -> None:
        self.manager = FakeManager()

    def stretch(self, until: Callable[[], bool], after: Callable[[], None]) -> Window:
        after()
        self.manager.k += 1
        after()
        return Window(3.0, 3, 2)


def test_a_phase_has_the_interval_at_both_of_its_ends_and_the_trace_each_change() -> None:
    loop = SimpleNamespace(iterate=lambda: None, synchronize=lambda: None)
    args = argparse.Namespace(phase=0.0, stretch=0.0, clean=0.0)
    recorder = Recorder(Trace("adaptive"), loop, FakeLive(), args)  # type: ignore[arg-type]
    recorder.phase("alone")
    recorder.phase("second load")
    phases = recorder.trace.phases
    assert [(each.first_k, each.last_k, each.checkpoints) for each in phases] == [
        (4, 5, 1),
        (5, 6, 1),
    ]
    assert [k for _, k in recorder.trace.intervals] == [4, 5, 6]
    assert len(recorder.trace.stretches) == 2


def phase(mean: float = 0.02, half_width: float | None = 0.01, **other: Any) -> dict[str, Any]:
    found = {"arm": "static", "phase": "alone", "model": "m", "bound": 0.035, "static": "settled"}
    found |= {"iteration_ms": 70.0, "k_start": 4, "k_end": 5, "checkpoints": 9, "overhead": 0.01}
    return {**found, "overhead_late": mean, "half_width_late": half_width, **HOW, **other}


@pytest.mark.parametrize(
    ("mean", "half_width", "verdict"),
    [
        (0.02, 0.01, "2.00 % ± 1.00 % | yes (3.50 %)"),
        (0.03, 0.01, "3.00 % ± 1.00 % | unclear (3.50 %)"),
        (0.04, 0.01, "4.00 % ± 1.00 % | unclear (3.50 %)"),
        (0.05, 0.01, "5.00 % ± 1.00 % | no (3.50 %)"),
        (0.05, None, "5.00 % | unclear (3.50 %)"),
    ],
)
def test_the_table_says_whether_the_bound_is_kept_or_unclear(
    mean: float, half_width: float | None, verdict: str
) -> None:
    assert f"| {verdict} |" in table.interference([phase(mean, half_width)])


def test_the_table_is_of_the_last_run_of_each_setting() -> None:
    older = [phase(), phase(arm="adaptive"), phase(arm="adaptive", phase="second load")]
    others = [phase(model="n"), phase(bound=0.01), phase(static="first")]
    text = table.interference([*older, *others, phase(0.07), phase(0.06, arm="adaptive")])
    assert text.count("\n| m | adaptive |") == 1
    assert text.count("\n| m | static |") == 2  # of two bounds
    assert "| m | static, first interval |" in text
    assert "| n | static |" in text
    assert "| 2.00 % ± 1.00 % | no (1.00 %)" not in text
    assert "7.00 %" in text


def test_without_a_trace_there_is_no_picture() -> None:
    assert interference.draw([{"arm": "static", "phase": "alone"}]) is None


def test_overhead_at_a_time_is_of_the_stretches_that_ended_within_the_width_before() -> None:
    costs = (1.0, 3.0, 5.0)
    stretches = [Stretch(n, n + 1, Sample(cost, 10.0)) for n, cost in enumerate(costs)]
    trace = Trace("adaptive", stretches=stretches)
    assert trace.overhead(2.0) == [(1, 0.1), (2, 0.2), (3, 0.4)]
