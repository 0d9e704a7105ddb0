"""Each benchmark runs to its end, at a size that shows nothing but that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "arguments", "arms"),
    [
        ("persist", ["--gib", "0.01", "--rounds", "1"], {"raw", "checkfreq", "torch.save"}),
        ("restore", ["--gib", "0.01", "--rounds", "1"], {"raw", "raw_fresh", "checkfreq"}),
        ("memory", ["--mib", "1", "--saves", "20"], {None}),
    ],
)
def test_it_prints_a_result_line_per_arm(
    name: str, arguments: list[str], arms: set[str | None], tmp_path: Path
) -> None:
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", *arguments]
    result = subprocess.run(
        [*command, "--folder", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert arms <= {line.get("arm") for line in lines}
    assert all(line["benchmark"] == name and line["commit"] and line["versions"] for line in lines)


def test_the_simulations_print_a_line_for_each_scenario_and_size() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.simulate"]
    result = subprocess.run(
        [*command, "--seeds", "1", "--failures", "20"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    arms = {json.loads(line)["arm"] for line in result.stdout.splitlines()}
    assert {"closed form", "3-minute stall every 18 minutes", "bursty", "8 GPUs"} <= arms
