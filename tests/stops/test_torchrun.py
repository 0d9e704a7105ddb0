"""A signal to torchrun: it passes the signal on, and waits for its ranks to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from checkfreq.store.store import CheckpointStore
from tests.stops.aiming import Case
from tests.stops.program import Life
from tests.stops.stopping import LIMIT_S, Run, run_whole

pytestmark = [pytest.mark.crash, pytest.mark.dist, pytest.mark.slow, pytest.mark.more]

ROOT = Path(__file__).resolve().parents[2]
CASE = Case(world=2, workers=0, to="process")
#: With the store of torchrun's agent, restarts hang on gloo (torch 2.13).
SETTINGS = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.parametrize("to", ["process", "group"])
def test_torchrun_that_is_told_to_stop_ends_once_the_last_boundary_of_all_ranks_is_durable(
    to: str, tmp_path: Path
) -> None:
    whole = run_whole(tmp_path / "whole", CASE)
    run = Run(tmp_path / "run", CASE)
    gate = tmp_path / "gate"
    life = Life(folder=str(run.folder), holds={"updated": [6, str(gate)]})
    log = tmp_path / "log"
    with torchrun(life, log) as process:
        until(Path(f"{gate}.reached").exists, process, log)
        if to == "group":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            process.send_signal(signal.SIGTERM)
        gate.touch()
        assert process.wait(LIMIT_S) == 1, log.read_text()  # torchrun's own, for a signal
    steps = CheckpointStore(run.chk_dir).steps()
    lived = run.live()
    assert lived.statuses == [0, 0], lived.logs
    for events, expected in zip(lived.events, whole.history, strict=True):
        assert events[1][:2] == ["restored", steps[-1]]
        first = 2 * steps[-1]  # a batch and a loss each: it stopped in the first epoch
        assert [e for e in events[2:] if e[0] != "closed"] == expected[first:]


def torchrun(life: Life, log: Path) -> subprocess.Popen[bytes]:
    """The training under torchrun, in a process group of its own."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0"]
    program = ["-m", "tests.stops.program", json.dumps(asdict(life))]
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", *launcher, "--monitor-interval=0.1", *program],
            cwd=ROOT,
            env={**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def until(happened: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for something that torchrun's ranks do."""
    end_s = time.monotonic() + LIMIT_S
    while not happened():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end_s, log.read_text()
        time.sleep(0.02)
