"""Goodput: where its figures come from, and what is made of them."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.goodput.inputs import Figure, Missing, in_seconds, measured
from benchmarks.goodput.measure import COSTS, RESTARTS, Setting, main, setting_of, summary
from benchmarks.goodput.plot import draw, title
from benchmarks.goodput.table import TABLES, age, last_runs, short
from benchmarks.lab.estimate import quartiles
from benchmarks.lab.results import lines_of
from benchmarks.lab.tables import tables_of
from benchmarks.plots import draw_all
from checkfreq.simulation.comparison import compare
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


# Where figures come from


def test_the_newest_line_with_all_figures_counts_and_is_named(tmp_path: Path) -> None:
    newer = {**OVERHEAD, "cost_s": 0.02, "commit": "def5678"}
    without = {**OVERHEAD, "cost_s": None, "commit": "0000000"}
    other_bound = {**OVERHEAD, "cost_s": 0.5, "bound": 0.1}
    write(tmp_path, OVERHEAD, newer, without, other_bound)
    found, line = measured(COSTS, tmp_path)
    assert found["cost_s"] == Figure(0.02, "overhead, m, commit def5678, 2 cores")
    assert line["commit"] == "def5678"


def test_the_first_source_that_has_a_line_counts(tmp_path: Path) -> None:
    paper = {"benchmark": "paper", "arm": "auto", "model": "p", **HOW}
    paper |= {"iteration_ms": 200.0, "cost_ms": 4.0, "durable_s": 0.25}
    write(tmp_path, paper, {**paper, "arm": "synchronous", "cost_ms": 90.0}, OVERHEAD)
    found, _ = measured(COSTS, tmp_path)
    assert {name: round(figure.value, 9) for name, figure in found.items()} == {
        "iteration_s": 0.2,
        "cost_s": 0.004,
        "durable_s": 0.25,
    }


def test_a_model_can_be_asked_for(tmp_path: Path) -> None:
    write(tmp_path, OVERHEAD, {**OVERHEAD, "model": "n", "cost_s": 0.3})
    found, _ = measured(COSTS, tmp_path, model="m")
    assert found["cost_s"].value == 0.01
    with pytest.raises(Missing, match="cost_s, durable_s of other: not measured yet"):
        measured(COSTS, tmp_path, model="other")


def test_a_missing_figure_says_how_to_measure_it(tmp_path: Path) -> None:
    with pytest.raises(Missing) as missing:
        measured(RESTARTS, tmp_path)
    assert str(missing.value) == (
        "restart_s: not measured yet, no result line has it. Measure it with `python -m "
        "benchmarks.interruptions >> benchmarks/results/interruptions.jsonl`, or give --restart-s"
    )


def test_a_newer_line_without_a_cost_is_skipped_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = [{**OVERHEAD, "cost_s": cost_s, "commit": f"{cost_s}"} for cost_s in (-0.2, -0.1)]
    write(tmp_path, OVERHEAD, *noisy, {**OVERHEAD, "model": "n"})
    found, _ = measured(COSTS, tmp_path, model="m")
    assert found["cost_s"].value == 0.01
    assert capsys.readouterr().err == (
        "overhead, m, commit -0.1, 2 cores: this newer line is left out, and 1 before it, "
        "without cost_s above 0\n"
    )
    measured(COSTS, tmp_path)  # the newest has all
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("value", "read"), [(None, None), (-3.0, None), (0.0, None), (4.0, 0.004)])
def test_a_difference_of_noisy_times_below_nothing_is_no_figure(
    value: float | None, read: float | None
) -> None:
    assert in_seconds("cost_ms")({"cost_ms": value}) == read


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


def test_a_given_figure_takes_the_place_of_a_measured_one(tmp_path: Path) -> None:
    options = Options(write(tmp_path, OVERHEAD), cost_s=0.25, restart_s=9.0)
    setting = setting_of(options)  # type: ignore[arg-type]
    assert values(setting)["cost_s"] == 0.25
    assert setting.figures["cost_s"].origin == setting.figures["restart_s"].origin == "given"
    assert values(setting)["iteration_s"] == 0.5


def test_the_example_is_only_taken_when_asked_for(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="iteration_s"):
        setting_of(Options(tmp_path))  # type: ignore[arg-type]
    example = setting_of(Options(tmp_path, setting="example", restart_s=5.0))  # type: ignore[arg-type]
    assert values(example) == {
        "iteration_s": 1.0,
        "cost_s": 1.0,
        "durable_s": 11.0,
        "restart_s": 5.0,
    }
    assert example.figures["cost_s"].origin == "example"


def test_all_of_the_cost_holds_training_and_the_rest_until_durable_is_beside_it() -> None:
    figures = {"iteration_s": 0.5, "cost_s": 0.25, "durable_s": 2.0, "restart_s": 1.0}
    setting = Setting("given", {name: Figure(value, "") for name, value in figures.items()})
    costs = setting.costs()
    assert (costs.cost_s, costs.durable_s, costs.persist_s) == (0.25, 2.0, 1.75)


def test_the_summary_has_the_median_and_quartiles_of_the_runs() -> None:
    figures = {"iteration_s": 1.0, "cost_s": 1.0, "durable_s": 11.0, "restart_s": 120.0}
    costs = Setting("", {name: Figure(value, "") for name, value in figures.items()}).costs()
    runs = [
        list(compare(costs, mtbf_s=1063.0, restart_s=120.0, days=0.5, seed=seed))
        for seed in range(3)
    ]
    found = summary(runs)
    goodputs = sorted(arm.outcome.goodput for each in runs for arm in each if arm.name == "bound")
    assert found["goodput"]["bound"] == round(goodputs[1], 5)
    low, high = quartiles(goodputs)
    assert (found["low"]["bound"], found["high"]["bound"]) == (round(low, 5), round(high, 5))
    assert found["interval_steps"]["bound"] == 29  # 1 s / (3.5 % of 1 s), rounded up
    assert low < high


# The whole of it


def test_without_a_measured_figure_it_ends_and_prints_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, OVERHEAD)
    monkeypatch.setattr(sys, "argv", ["goodput", "--gpus", "8", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="goodput: restart_s: not measured yet"):
        main()
    assert capsys.readouterr().out == ""


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


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
def test_table_and_plot_follow_from_the_lines_and_are_the_same_every_time(tmp_path: Path) -> None:
    example = (*SMALL, "--setting", "example")
    lines = run_forked("goodput", *example, output=tmp_path / "stdout")
    write(tmp_path, *lines)
    table, restarts = tables_of(lines_of("goodput", tmp_path), TABLES)
    for each in (table, restarts):
        assert "An iteration takes 1 s, a checkpoint costs 1 s, durable after 11 s" in each
        assert "(example); failures as published (research):" in each
        assert "Of many ranks: meetings measured up to" in each
    assert re.search(r"\| 16,384 \| 1.8 h \| [0-9.]+ m?s \* \| ", table)
    for storage in ("shared storage", "nodes' disks"):
        assert f"| 100,000 | {storage} | 18 min | " in restarts
    pictures = []
    for name in ("first", "second"):
        (path,) = draw_all(results=tmp_path, out=tmp_path / name)
        pictures.append(path.read_text())
    assert pictures[0] == pictures[1]
    assert "every 30 min" in pictures[0]


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


@pytest.mark.parametrize(
    ("gpus", "measured", "shown"),
    [
        (16, {"meeting": 512}, "| 2.5 ms |"),
        (1024, {"meeting": 512}, "| 2.5 ms * |"),
        (16, {}, "- |"),
    ],
)
def test_a_meeting_that_is_extrapolated_is_marked(
    gpus: int, measured: dict[str, int], shown: str
) -> None:
    ranks = {"meeting_s": 0.0025, "measured": measured, "deviation": dict.fromkeys(measured, 0.29)}
    table = TABLES["goodput"].build([simulated(gpus, ranks=ranks)])
    assert shown in table
    assert ("fitted within 29 %" in table) == bool(measured)


def simulated(gpus: int, **changed: Any) -> dict[str, Any]:
    """A line of a setting that is measured."""
    line = {"benchmark": "goodput", "setting": "measured", "model": "m", "rate": "research", **HOW}
    line |= {"iteration_s": 0.5, "cost_s": 0.01, "durable_s": 2.0, "restart_s": 7.0}
    line |= {"gpus": gpus, "mtbf_s": 3600.0, "notice_s": 0.0, "goodput": {"bound": 0.5}}
    line["figures"] = dict.fromkeys(("iteration_s", "cost_s", "durable_s", "restart_s"), "given")
    return {**line, **changed}


@pytest.mark.parametrize(
    "changed", [{"cost_s": 0.3}, {"notice_s": 60.0}, {"commit": "0000000"}, {"command": "other"}]
)
def test_a_table_is_of_one_run(changed: dict[str, Any]) -> None:
    old = [simulated(gpus, **changed) for gpus in (8, 64)]
    new = [simulated(gpus) for gpus in (512, 8)]
    assert last_runs([*old, *new]) == [[new[1], new[0]]]


def test_every_rate_and_model_has_its_own_table(tmp_path: Path) -> None:
    lines = [simulated(8), simulated(8, rate="cloud"), simulated(64), simulated(8, model="n")]
    assert last_runs(lines) == [[lines[0], lines[2]], [lines[1]], [lines[3]]]
    write(tmp_path, *lines)
    (table,) = tables_of(lines_of("goodput", tmp_path), TABLES)
    assert table.count("failures as published (research)") == 2
    assert table.count("failures as published (cloud)") == 1


def test_a_panel_names_rate_and_notice() -> None:
    assert title(simulated(8, notice_s=60.0)) == (
        "m, failures as in research:\ncheckpoint 10 ms, iteration 500 ms, restart 7 s + 60 s notice"
    )
    assert "notice" not in title(simulated(8))


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
def test_the_plot_has_a_panel_per_rate_of_its_last_run_alone() -> None:
    old, new = simulated(8, cost_s=0.3), [simulated(gpus) for gpus in (64, 512)]
    figure = draw([old, simulated(8, rate="cloud"), *new])
    assert figure is not None
    first, second = figure.axes
    assert list(first.lines[0].get_xdata()) == [64, 512]
    assert "cloud" in second.get_title()


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.0661, "66.1 ms"), (1.5, "1.5 s"), (120.0, "120 s")]
)
def test_short_times_are_in_milliseconds(seconds: float, said: str) -> None:
    assert short(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(1063.4, "18 min"), (11_160.0, "3.1 h"), (1_036_800.0, "12.0 d")]
)
def test_long_times_are_in_the_largest_unit(seconds: float, said: str) -> None:
    assert age(seconds) == said
