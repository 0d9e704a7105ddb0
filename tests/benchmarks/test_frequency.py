"""The comparison of how often savers can save, at toy size."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers import OURS
from tests.benchmarks.test_benchmarks_run import TINY_WINDOWS, lines_of

PEER = "torch.save, synced"


def test_it_prints_costs_equal_intervals_policies_and_the_target(tmp_path: Path) -> None:
    lines = lines_of(
        "frequency",
        *(*TINY_WINDOWS, "--seconds", "0", "--k", "2", "--window", "1", "--bound", "0.9"),
        *("--profile-iterations", "2", "--verify", "1", "--arms", OURS, PEER),
        *("--policies", "AUTO", "paper, formula"),
        folder=tmp_path,
    )
    arms = [(line["what"], line["arm"]) for line in lines]
    assert arms[:4] == [("arm", OURS), ("arm", PEER), ("equal", OURS), ("equal", PEER)]
    assert arms[4:] == [("policy", "AUTO"), ("policy", "paper, formula"), ("target", OURS)]
    assert all(line["k"] >= 1 and line["lost_s"] > 0 for line in lines if line["what"] == "policy")
    assert all(line["k_min"] >= 1 and line["cost_low_ms"] is None for line in lines[:2])
    assert all(line["overhead"] is not None and line["rounds"] == 1 for line in lines[2:4])
    assert all(line["tokens"] == 32 and "image_size" not in line for line in lines)
    assert [line["place"] for line in lines if line["what"] == "policy"] == ["host"] * 2
    assert (lines[-1]["rival"], [each["k"] for each in lines[-1]["equal"]]) == (PEER, [2])
