"""The job files for Kubernetes and SkyPilot run, and fit our exit statuses."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkfreq.store.store import CheckpointStore
from iterators import TrainingStopped

pytestmark = pytest.mark.more

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "checkfreq/examples/jobs"
JOB: dict[str, Any] = yaml.safe_load((JOBS / "kubernetes.yaml").read_text())
SKY: dict[str, Any] = yaml.safe_load((JOBS / "sky.yaml").read_text())
#: Trains on in its first run until it is told to stop.
SLOW = [sys.executable, "-m", "tests.slurm.trainer", "--slow-runs=1"]
DEADLINE_S = 240.0


def container() -> dict[str, Any]:
    (only,) = JOB["spec"]["template"]["spec"]["containers"]
    return only


def environment(**more: str) -> dict[str, str]:
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": beside, "OMP_NUM_THREADS": "1", "PAUSE_S": "0", **more}


@contextlib.contextmanager
def training(command: list[str], chk_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command that trains, once it has taken a checkpoint."""
    with subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True) as process:
        try:
            wait_for_checkpoint(chk_dir, process)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for_checkpoint(chk_dir: Path, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not (chk_dir.exists() and CheckpointStore(chk_dir).steps()):
        assert process.poll() is None
        assert time.monotonic() < end_s
        time.sleep(0.05)


# ---- Kubernetes


def test_the_job_runs_again_when_it_was_told_to_stop_and_counts_crashes() -> None:
    status, evicted = JOB["spec"]["podFailurePolicy"]["rules"]
    assert status == {
        "action": "Ignore",
        "onExitCodes": {
            "containerName": container()["name"],
            "operator": "In",
            "values": [TrainingStopped().code],
        },
    }
    assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert JOB["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # or the API refuses it


def test_the_jobs_checkpoints_outlive_its_pod() -> None:
    pod = JOB["spec"]["template"]["spec"]
    mounted = {mount["mountPath"]: mount["name"] for mount in container()["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    *_, chk_dir = container()["command"]
    assert "persistentVolumeClaim" in volumes[mounted[str(Path(chk_dir).parent)]]
    assert {*mounted.values()} == {*volumes}


def test_a_container_that_is_stopped_ends_with_the_status_that_the_job_ignores(
    tmp_path: Path,
) -> None:
    chk_dir = tmp_path / "run"
    with training([*SLOW, str(chk_dir)], chk_dir) as process:
        process.terminate()
        status = process.wait(DEADLINE_S)
    assert [status] == JOB["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]


# ---- spot machines


def test_skys_command_trains_and_it_recovers_from_a_stop(tmp_path: Path) -> None:
    assert set(SKY) == {"name", "resources", "envs", "workdir", "setup", "run"}
    recovery = SKY["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [TrainingStopped().code]
    done = subprocess.run(
        ["bash", "-c", SKY["run"]],
        cwd=ROOT,
        env=environment(CHK_DIR=str(tmp_path / "run")),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "digest" in done.stdout
    assert CheckpointStore(tmp_path / "run").steps()
