"""The paper's models: what follows from their costs is exact, and each of them trains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.lab.estimate import Estimate
from benchmarks.lab.overheads import Measured
from benchmarks.paper import table as tables
from benchmarks.paper.arms import auto_arm
from benchmarks.paper.trial import Chosen, Measurements, Windows
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
    def test_an_automatic_arm_has_its_parts_and_its_storage_limit(self) -> None:
        arm = auto_arm(measurements(), on_cpu()["resnet18"], bound=0.035)
        assert (arm["k"], arm["overhead"], arm["low"], arm["high"]) == (10, 0.025, 0.015, 0.035)
        assert (arm["cost_ms"], arm["cost_low_ms"], arm["cost_high_ms"]) == (125.0, 75.0, 175.0)
        assert (arm["boundary_ms"], arm["wait_ms"], arm["rest_ms"]) == (10.0, 20.0, 95.0)
        assert (arm["storage_limit"], arm["k_against_limit"]) == (4.0, 2.5)
        assert arm["recovery_s"] == 2.0 + 5 * 0.5 + 3.0
        assert arm["met"]


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
