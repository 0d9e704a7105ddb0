"""Traces: one is recorded under a real load and replayed; the table says what lines say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lab.tables import tables_of
from benchmarks.traces.measure import FOLDER, SCENES, names_of
from benchmarks.traces.table import TABLES
from checkfreq.simulation.recorded import read_trace
from tests.benchmarks.test_benchmarks_run import run_forked


@pytest.mark.parametrize("name", ["throttled", "two-ranks"])
def test_a_run_is_recorded_under_its_load_and_replayed(tmp_path: Path, name: str) -> None:
    into = ("--into", str(tmp_path))
    run_forked("traces", "record", name, "--seconds", "4", *into, output=tmp_path / "recorded")
    assert names_of(tmp_path) == [name]
    run = read_trace(tmp_path / f"{name}.jsonl.gz")
    assert run.origin["scene"] == SCENES[name].says
    assert run.origin["command"].endswith(f"traces record {name} --seconds 4 --into DIR")
    assert float(run.origin["cores used by others"]) >= 0
    assert run.num_iterations > 10
    (line,) = run_forked("traces", "replay", *into, output=tmp_path / "replayed")
    assert (line["arm"], line["iterations"]) == (name, run.num_iterations)
    assert line["auto"]["checkpoints"] >= 1
    (table,) = tables_of([line], TABLES)
    assert f"| {SCENES[name].says} | {line['load']} | {line['others']} |" in table


def test_a_trace_without_an_ideal_has_a_row_too() -> None:
    figures = {"interval": None, "over_ideal": None, "overhead": 0.0, "worst": 0.0}
    line = {
        **{
            "benchmark": "traces",
            "arm": "a",
            "scene": "alone",
            "others": None,
            "load": "0.1",
            "iteration_ms": 1,
        },
        **{"cost_ms": 2.0, "ideal": None, "recorded": figures, "auto": figures},
        **{"commit": "abc1234", "machine": {"cores": 2, "accelerator": None}},
        **{"versions": {"torch": "2.13.0"}, "command": "python -m benchmarks.traces"},
    }
    (table,) = tables_of([line], TABLES)
    assert "| alone | 0.1 | – | 1 ms | 2 ms | – | – | – | – | 0.00 % | 0.00 % |" in table


def test_every_scene_has_been_recorded() -> None:
    assert names_of(FOLDER) == sorted(SCENES)
