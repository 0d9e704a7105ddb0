"""The trace of the interference benchmark: emitted as lines, drawn from them alone."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.interference import table as table
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


def phase(mean: float = 0.02, half_width: float | None = 0.01, **other: Any) -> dict[str, Any]:
    found = {"arm": "static", "phase": "alone", "model": "m", "bound": 0.035, "static": "settled"}
    found |= {"iteration_ms": 70.0, "k_start": 4, "k_end": 5, "checkpoints": 9, "overhead": 0.01}
    return {**found, "overhead_late": mean, "half_width_late": half_width, **HOW, **other}
