"""The suite lists itself, runs the chosen calls, and keeps within its budget."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.suite import (
    LONGER,
    ON_CPU,
    OVERRAN,
    ROOT,
    Call,
    chosen,
    in_a_process,
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


def test_the_list_has_the_command_of_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    listed = capsys.readouterr().out
    for call in ALL:
        assert f"    {call.command}  (~{call.seconds:.0f} s)\n" in listed


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


def test_a_failed_call_leaves_no_line_and_does_not_stop_the_rest(tmp_path: Path) -> None:
    def run(call: Call, limit_s: float) -> tuple[int, str]:
        return ended(call, status=3 if call.name == "a" else 0)

    outcomes = run_all([Call("a", "", 1), Call("b", "", 1)], results=tmp_path, run=run)
    assert [outcome.status for outcome in outcomes] == [3, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["b.jsonl"]
    assert command.ended(outcomes).splitlines()[0] == "    status 3  python -m benchmarks.a"


def test_a_call_that_would_not_finish_within_the_budget_is_skipped(tmp_path: Path) -> None:
    calls = [Call("long", "", 1000), Call("short", "", 1)]
    outcomes = run_all(calls, results=tmp_path, budget_s=60, run=ended)
    assert outcomes[0].seconds is None
    assert [path.name for path in tmp_path.iterdir()] == ["short.jsonl"]
    assert command.ended(outcomes).startswith("     skipped  python -m benchmarks.long\n")


def test_names_select_calls_and_a_wrong_name_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = [Call("a", "-x", 1), Call("b", "", 1), Call("a", "-y", 1)]
    assert [call.options for call in chosen(calls, ["a"])] == ["-x", "-y"]
    assert chosen(calls, []) == calls
    with pytest.raises(SystemExit):
        command.main(["run", "nothing"])
    assert "no benchmark nothing here; there are compare, " in capsys.readouterr().err


def test_a_call_runs_as_a_reader_would_type_it(tmp_path: Path) -> None:
    (outcome,) = run_all([Call("memory", "--mib 1 --saves 10", 1)], results=tmp_path)
    assert outcome.status == 0
    lines = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    assert {line["command"] for line in lines} == {"python -m benchmarks.memory --mib 1 --saves 10"}


def test_a_call_that_overruns_is_interrupted_and_cleans_up(tmp_path: Path) -> None:
    status, lines = in_a_process(Call("memory", f"--mib 1 --folder {tmp_path}", 1), limit_s=2.0)
    assert (status, lines) == (OVERRAN, "")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_call_keeps_its_own_status() -> None:
    status, lines = in_a_process(Call("memory", "--no-such-option", 1), limit_s=math.inf)
    assert (status, lines) == (2, "")
