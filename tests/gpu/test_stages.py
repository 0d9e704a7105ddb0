"""Stages of the proof on a GPU, as dry runs on the CPU: they run, and their claims can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.gpu.page import ROOT

pytestmark = [pytest.mark.more, pytest.mark.slow]

#: By stage, what is claimed of it.
CLAIMS = {
    "resnet": {"model", "optimizer", "scaler", "losses", "generators", "restarts", "warnings"},
    "fsdp": {"model", "optimizer", "losses", "generators", "restarts", "warnings"},
    "graphs": {"model", "optimizer", "losses", "generators", "restarts", "warnings", "checkpoints"},
    "compiled": {"model", "optimizer", "losses", "generators", "restarts", "warnings"},
}


def lines_of(name: str, *options: str) -> list[dict[str, Any]]:
    """What a dry run prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.gpu.stages.{name}", "--dry", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["stage"] for line in lines} == {name}
    return lines


@pytest.mark.parametrize("name", CLAIMS)
def test_a_dry_run_resumes_to_the_same_bits(name: str) -> None:
    claims = [line for line in lines_of(name) if "ok" in line]
    assert [line for line in claims if not line["ok"]] == []
    assert {line["what"] for line in claims} == CLAIMS[name]


def test_a_dry_run_restores_from_memory_and_from_the_disk() -> None:
    lines = [line for line in lines_of("restoring") if "ok" in line]
    assert [(line["source"], line["ok"]) for line in lines] == [("memory", True), ("disk", True)]


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_a_dry_run_has_the_interval_and_its_overhead() -> None:
    (line,) = [line for line in lines_of("gpt2") if "k" in line]
    assert line["k"] >= 1
    assert line["checkpoints"] >= 2
    assert {"stall_s", "copy_s", "persist_s", "overhead"} <= line.keys()


def test_state_that_is_not_what_was_saved_fails_the_claims() -> None:
    lines = lines_of("graphs", "--spoil")
    failed = {line["what"] for line in lines if not line.get("ok", True)}
    assert failed == {"model", "optimizer", "losses", "checkpoints"}
