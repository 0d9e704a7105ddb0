"""The trace of the interference benchmark: emitted as lines, drawn from them alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.estimate import Sample, Stretch
from benchmarks.interference import Trace
from benchmarks.plots import interference
from benchmarks.plots.common import save
from benchmarks.tables import interference as table
from tests.benchmarks.test_benchmarks_run import TINY_WINDOWS, lines_of

PHASES = ["alone", "second load", "alone again"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    short = ("--settle", "0", "--phase", "0.1", "--stretch", "0.1", "--clean", "0.1")
    folder = tmp_path_factory.mktemp("interference")
    return lines_of("interference", *TINY_WINDOWS, "--interval", "2", *short, folder=folder)


def test_it_prints_a_line_per_arm_and_phase_and_a_trace_per_arm(
    lines: list[dict[str, object]],
) -> None:
    in_phases = [line for line in lines if "phase" in line]
    assert [(line["arm"], line["phase"]) for line in in_phases] == [
        (arm, phase) for arm in ("static", "adaptive") for phase in PHASES
    ]
    assert all(line["k_start"] == line["k_end"] == 2 for line in in_phases)
    traces = [line for line in lines if line.get("trace")]
    assert [trace["arm"] for trace in traces] == ["static", "adaptive"]
    for trace in traces:
        assert [name for name, _, _ in trace["phases"]] == PHASES  # type: ignore[attr-defined]
        assert len(trace["overheads"]) >= len(PHASES)  # type: ignore[arg-type]
        assert [k for _, k in trace["intervals"]] == [2]  # type: ignore[attr-defined]
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


def test_without_a_trace_there_is_no_picture() -> None:
    assert interference.draw([{"arm": "static", "phase": "alone"}]) is None


def test_overhead_at_a_time_is_of_the_stretches_that_ended_within_the_width_before() -> None:
    costs = (1.0, 3.0, 5.0)
    stretches = [Stretch(n, n + 1, Sample(cost, 10.0)) for n, cost in enumerate(costs)]
    trace = Trace("adaptive", stretches=stretches)
    assert trace.overhead(2.0) == [(1, 0.1), (2, 0.2), (3, 0.4)]
