"""The paper's models: each of them trains, and what follows from their costs is exact."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.paper import table as tables
from checkfreq.examples.imagenet.options import is_installed
from tests.benchmarks.test_benchmarks_run import lines_of

needs_torchvision = pytest.mark.skipif(
    not is_installed("torchvision"), reason="torchvision is not installed"
)
needs_transformers = pytest.mark.skipif(
    not is_installed("transformers"), reason="transformers is not installed"
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
    cost_ms = auto["overhead"] * auto["k"] * auto["iteration_ms"]
    assert auto["cost_ms"] == pytest.approx(cost_ms, rel=0.01, abs=0.1)
    assert auto["k_against_limit"] == pytest.approx(auto["k"] / auto["storage_limit"], rel=0.01)
    assert (epoch["k"], epoch["held_ms"]) == (400, still["held_ms"])
    assert tables.gains(lines[:3]) == {"400 iterations": [epoch["recovery_s"] / auto["recovery_s"]]}
    cpu = f"cpu, 1 thread of {os.cpu_count()} cores"
    assert f"| resnet18, {cpu}, 2 × 32 px |" in tables.arms(lines)
    assert f"| gpt2, {cpu}, 2 × 4 tokens |" in tables.stalls(lines)
