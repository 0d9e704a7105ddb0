"""The suite lists itself, runs the chosen calls, and keeps within its budget."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks.suite import (
    LONGER,
    ON_CPU,
    ROOT,
    Call,
    run_all,
    summary,
)

ALL = (*ON_CPU, *LONGER)


def ended(call: Call, limit_s: float = 0.0, *, status: int = 0) -> tuple[int, str]:
    return status, json.dumps({"benchmark": call.name, "options": call.options}) + "\n"


@pytest.mark.parametrize("call", ALL, ids=lambda call: call.command)
def test_every_call_is_of_a_benchmark_that_says_what_it_measures(call: Call) -> None:
    assert (ROOT / "benchmarks" / call.name / "__main__.py").exists()
    assert summary(call.name).endswith(".")


def test_the_suite_is_meant_to_fit_its_time() -> None:
    assert sum(call.seconds for call in ON_CPU) < 20 * 60


@pytest.mark.parametrize("call", ALL, ids=lambda call: call.command)
def test_every_call_has_options_that_its_benchmark_takes(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{call.name}.measure")
    parsers = [x for x in ("_arguments", "arguments") if x in vars(module)]
    monkeypatch.setattr("sys.argv", [call.name, *call.options.split()])
    for parse in parsers:
        getattr(module, parse)()
    assert parsers or not call.options


def test_lines_are_appended_to_the_result_file_of_each_benchmark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    run_all([Call("a", "-x", 1), Call("b", "", 1)], results=tmp_path, run=ended)
    assert (tmp_path / "a.jsonl").read_text() == '{}\n{"benchmark": "a", "options": "-x"}\n'
    assert (tmp_path / "b.jsonl").read_text() == '{"benchmark": "b", "options": ""}\n'
