"""The paper's models: what follows from their costs is exact, and each of them trains."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.derived import recovery_s
from benchmarks.lab.estimate import Estimate
from benchmarks.lab.overheads import Measured
from benchmarks.lab.paired import FrozenArm, Round
from benchmarks.lab.training import Loop
from benchmarks.paper import table as tables
from benchmarks.paper.arms import auto_arm, held_arm
from benchmarks.paper.recording import CheckpointCosts, WindowRecord
from benchmarks.paper.trial import Chosen, Measurements, Windows, kept
from benchmarks.paper.workloads import on_cpu
from checkfreq.examples.imagenet.options import is_installed
from checkfreq.types import SnapshotPlace
from tests.benchmarks.test_benchmarks_run import lines_of

#: Runs what users have beside us: large frameworks (`make test-more`).

needs_torchvision = pytest.mark.skipif(
    not is_installed("torchvision"), reason="torchvision is not installed"
)
needs_transformers = pytest.mark.skipif(
    not is_installed("transformers"), reason="transformers is not installed"
)


class TestWhatFollowsFromTheCosts:
    def test_recovery_is_the_restore_half_an_interval_and_the_time_to_durable(self) -> None:
        assert recovery_s(restore_s=3.0, steps=10, iteration_s=0.5, durable_s=1.25) == 6.75

    def test_an_automatic_arm_has_its_parts_and_its_storage_limit(self) -> None:
        arm = auto_arm(measurements(), on_cpu()["resnet18"], bound=0.035)
        assert (arm["k"], arm["overhead"], arm["low"], arm["high"]) == (10, 0.025, 0.015, 0.035)
        assert (arm["cost_ms"], arm["cost_low_ms"], arm["cost_high_ms"]) == (125.0, 75.0, 175.0)
        assert (arm["boundary_ms"], arm["wait_ms"], arm["rest_ms"]) == (10.0, 20.0, 95.0)
        assert (arm["storage_limit"], arm["k_against_limit"]) == (4.0, 2.5)
        assert arm["recovery_s"] == 2.0 + 5 * 0.5 + 3.0
        assert arm["met"]

    def test_standing_still_costs_what_it_takes(self) -> None:
        arm = held_arm(measurements(), steps=10)
        assert (arm["overhead"], arm["held_ms"]) == (0.8, 4000.0)
        assert (arm["low"], arm["high"]) == (0.8, 0.8)
        assert arm["recovery_s"] == 2.0 + 5 * 0.5 + 4.0


HOST = SnapshotPlace.HOST
FOUND = Estimate(0.025, 0.005, 0.015, 0.035)


def measurements(found: Estimate = FOUND, *, taken: float = 1.0) -> Measurements:
    """T is 0.5 s; a checkpoint is durable after 3 s, and its restore takes 2 s."""
    overhead = Measured(
        estimate=found,
        estimate_all=found,
        num_rounds=4,
        num_left_out=0,
        iteration_s=0.5,
        foreign=0.0,
        taken=taken,
        seconds=20.0,
    )
    windows = Windows(
        overhead=overhead,
        checkpoints=4,
        persist_s=2.5,
        durable_s=3.0,
        held_s=0.03,
        wait_s=0.02,
        still_s=[4.0, 4.0, 4.0],
    )
    return Measurements(
        chosen=Chosen(
            steps=10, reason="budget", predicted_overhead=0.03, durable_s=3.0, place=HOST
        ),
        windows=windows,
        restore_s=[1.0, 2.0, 5.0],
        raw_write_s=2.0,
        num_parameters=7,
        state_bytes=84,
        epoch_iterations=None,
    )


class TestWindows:
    @pytest.mark.parametrize(
        ("steps", "durable_s", "iterations"),
        [
            (10, 3.0, 10),  # durable after 6 iterations: whole intervals
            (100, 3.0, 12),  # over long before the next one
            (1, 0.1, 1),  # at least half a second: one iteration is that
        ],
    )
    def test_a_window_is_whole_intervals_or_twice_the_time_to_durable(
        self, steps: int, durable_s: float, iterations: int
    ) -> None:
        plan = Chosen(
            steps=steps, reason="", predicted_overhead=0.0, durable_s=durable_s, place=HOST
        )
        assert plan.window(iteration_s=0.5) == iterations

    def test_a_cut_window_has_one_checkpoint_that_is_for_the_whole_interval(
        self, tmp_path: Path
    ) -> None:
        arm = FrozenArm(Loop("transformer", batch=1), tmp_path, interval=50, length=3)
        arm.warm_up()
        window = arm.window()
        assert (arm.iterations, window.covered, arm.taken) == (3, 50, 1.0)
        assert window.iterations >= 3
        arm.close()


@needs_torchvision
@needs_transformers
def test_a_model_of_each_kind_prints_its_three_arms(tmp_path: Path) -> None:
    small = ("--preset", "cpu", "--device", "cpu", "--batch", "2", "--seconds", "1")
    lines = lines_of(
        "paper",
        *(*small, "--model", "resnet18", "gpt2", "--tokens", "4", "--epoch-iterations", "400"),
        folder=tmp_path,
    )
    assert [(x["model"], x["arm"]) for x in lines] == [
        (model, arm)
        for model in ("resnet18", "gpt2")
        for arm in ("auto", "synchronous", "epoch boundary")
    ]
    for x in lines:
        iteration_s = x["iteration_ms"] / 1e3
        wanted = x["restore_s"] + x["k"] / 2 * iteration_s + x["durable_s"]
        assert x["recovery_s"] == pytest.approx(wanted, rel=0.01)
        assert x["state_mib"] > x["parameters"] * 8 / 2**20
    auto, still, epoch = lines[:3]
    assert auto["k"] == still["k"]
    assert auto["taken"] is not None
    assert (epoch["k"], epoch["held_ms"]) == (400, still["held_ms"])
    assert tables.gains(lines[:3]) == {"400 iterations": [epoch["recovery_s"] / auto["recovery_s"]]}
    cpu = f"cpu, 1 thread of {os.cpu_count()} cores"
    assert f"| resnet18, {cpu}, 2 × 32 px |" in tables.arms(lines)
    assert f"| gpt2, {cpu}, 2 × 4 tokens |" in tables.stalls(lines)


class TestNotes:
    def test_held_and_waited_are_of_the_rounds_that_overhead_is_of(self, tmp_path: Path) -> None:
        records = [WindowRecord(0.1, 0.0, range(1, 3), 2), WindowRecord(9.0, 8.0, range(3, 5), 2)]
        records += [WindowRecord(0.3, 0.2, range(5, 7), 2), WindowRecord(0.2, 0.1, range(7, 9), 2)]
        done = [Round({}, 1.0, foreign) for foreign in (0.0, 0.9, 0.05, 0.0)]
        events = [{"kind": "committed", "step": step} for step in (0, 2, 4, 5, 8, 9)]
        text = "".join(f"{json.dumps(x)}\n" for x in [*events, {"kind": "plan"}])
        (tmp_path / "events.jsonl").write_text(text)
        found = CheckpointCosts.of(kept(records, done), tmp_path)
        assert (found.checkpoints, found.held_s, found.wait_s) == (6, *approx(0.1, 0.05))
        assert [each["step"] for each in found.events] == [2, 5, 8]


def approx(*values: float) -> list[Any]:
    return [pytest.approx(each) for each in values]
