"""Goodput: where its figures come from, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.goodput.measure import Setting, setting_of
from tests.benchmarks.test_benchmarks_run import run_forked

HOW = {
    "commit": "abc1234",
    "machine": {"cores": 2, "accelerator": None},
    "versions": {"torch": "2.13.0"},
    "command": "python -m benchmarks.x",
}
OVERHEAD = {"benchmark": "overhead", "arm": "live", "model": "m", "bound": 0.035, **HOW}
OVERHEAD |= {"iteration_s": 0.5, "cost_s": 0.01, "durable_s": 2.0}
RESUMED = {"benchmark": "interruptions", "arm": "auto", "model": "r", "resume_s": 7.0, **HOW}


def write(results: Path, *lines: dict[str, Any]) -> Path:
    for line in lines:
        with (results / f"{line['benchmark']}.jsonl").open("a") as file:
            file.write(f"{json.dumps(line)}\n")
    return results


class Options:
    """What the command line gives by default."""

    def __init__(self, results: Path, **given: Any) -> None:
        defaults = dict.fromkeys(("iteration_s", "cost_s", "durable_s", "restart_s", "model"))
        self.__dict__.update(defaults, setting="measured", results=results)
        self.__dict__.update(given)


def values(setting: Setting) -> dict[str, float]:
    return {name: figure.value for name, figure in setting.figures.items()}


# What is simulated


def test_costs_and_restart_come_from_their_own_lines(tmp_path: Path) -> None:
    setting = setting_of(Options(write(tmp_path, OVERHEAD, RESUMED)))  # type: ignore[arg-type]
    assert values(setting) == {
        "iteration_s": 0.5,
        "cost_s": 0.01,
        "durable_s": 2.0,
        "restart_s": 7.0,
    }
    assert setting.model == "m"
    assert setting.figures["restart_s"].origin == "interruptions, r, commit abc1234, 2 cores"


# The whole of it


SMALL = ("--gpus", "16384", "100000", "--seeds", "1", "--days", "0.2")


def test_it_prints_a_line_per_size_from_what_was_measured(tmp_path: Path) -> None:
    results = write(tmp_path, OVERHEAD, RESUMED)
    lines = run_forked("goodput", *SMALL, "--results", str(results), output=tmp_path / "stdout")
    assert [line["gpus"] for line in lines] == [16384, 100000]
    assert {line["mtbf_s"] for line in lines} == {6490.4, 1063.4}
    assert lines[0]["figures"] == {
        **dict.fromkeys(
            ("iteration_s", "cost_s", "durable_s"), "overhead, m, commit abc1234, 2 cores"
        ),
        "restart_s": "interruptions, r, commit abc1234, 2 cores",
    }
    assert {"bound", "fixed", "young", "auto goodput", "paper, formula"} <= set(
        lines[0]["goodput"]  # type: ignore[call-overload]
    )


def test_restarts_are_told_apart_where_the_bytes_are_known(tmp_path: Path) -> None:
    results = write(tmp_path, OVERHEAD, RESUMED)
    given = ("--results", str(results), "--state-bytes", "1000000000000", "--rank-costs", "none")
    lines = run_forked("goodput", *SMALL, *given, output=tmp_path / "stdout")
    found = [line for line in lines if line["what"] == "recovery"]
    assert [(line["gpus"], line["checkpoints_on"]) for line in found] == [
        (gpus, storage) for gpus in (16384, 100000) for storage in ("shared", "own")
    ]
    for line in found:
        # Nothing else differs, and ranks cost nothing.
        assert line["goodput"] == line["free"]
        total = sum(line["failures_per_day"].values())  # type: ignore[attr-defined]
        assert total == pytest.approx(86_400 / line["mtbf_s"], rel=1e-3)  # type: ignore[operator]
    _, on_nodes = found[2:]
    each = on_nodes["restarts"]
    assert each["memory"]["lost_s"] < each["shared"]["lost_s"]  # type: ignore[index]
    assert each["local"]["per_day"] > 0  # type: ignore[index]
