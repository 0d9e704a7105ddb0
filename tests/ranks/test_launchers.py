"""Runs started by torchrun: a killed rank costs nobody anything, at any number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.processes import verify_all
from tests.acceptance.rank_training import NUM_SAMPLES
from tests.ranks import script

pytestmark = [pytest.mark.crash, pytest.mark.dist, pytest.mark.slow, pytest.mark.more]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400.0

TORCHRUN = ("torch.distributed.run", "--standalone", "--max-restarts=1", "--monitor-interval=0.1")


def launch(folder: Path, launcher: tuple[str, ...], world: int, *arguments: str) -> dict[str, Any]:
    """Run the script on ``world`` ranks; how often each sample was learnt, and a note per start."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", *launcher, f"--nproc-per-node={world}"]
    command += ["-m", script.__name__, "--folder", str(folder), *arguments]
    output = folder / f"output-{sum(1 for _ in folder.glob('output-*'))}"
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, env=environment(), start_new_session=True
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # faulthandler prints every stack
            process.wait(10)
            raise AssertionError(output.read_text()) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, output.read_text()
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    notes = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
    return {"counts": result["counts"], "notes": notes}


def environment() -> dict[str, str]:
    """One thread each; with the store of torchrun's agent, restarts hang on gloo (torch 2.13)."""
    ours = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": str(ROOT),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return {**os.environ, **ours}


def starts(found: dict[str, Any]) -> list[tuple[int, int]]:
    """World and step of each start of a rank, in order."""
    return [(note["world"], note["step"]) for note in found["notes"]]


def test_killed_and_restarted_runs_go_on_at_any_number_of_ranks_and_learn_every_sample_once(
    tmp_path: Path,
) -> None:
    """Killed twice: restarted by torchrun at the same world, then started anew at another."""
    deaths = ("--die", "0", "1", "--die-at", "5", "11")
    with pytest.raises(AssertionError, match="ChildFailedError") as failed:
        launch(tmp_path, TORCHRUN, 2, *deaths)
    assert (tmp_path / "died-1").exists(), failed.value
    found = launch(tmp_path, TORCHRUN, 3)
    assert found["counts"] == [[1] * NUM_SAMPLES] * script.EPOCHS
    first, second, third = starts(found)[:2], starts(found)[2:4], starts(found)[4:]
    assert first == [(2, 0)] * 2
    assert second == [second[0]] * 2
    assert third == [third[0]] * 3
    assert 0 < second[0][1] <= 5 < third[0][1] <= 11
    verify_all(tmp_path / "chk")
