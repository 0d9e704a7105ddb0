"""The job scripts of checkfreq/examples/jobs: who is requeued, and who is not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import SCRIPTS, Cluster
from tests.slurm.jobs import submit

pytestmark = [pytest.mark.slurm, pytest.mark.more, pytest.mark.slow]


def test_where_requeueing_is_forbidden_the_log_says_what_to_do(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = submit(cluster, "single.sbatch", tmp_path, ("--no-requeue",), slow_runs=1)
    job.wait_for_run(1)

    cluster.signal_script(job.number)

    assert cluster.wait_for_end(job.number) == ["FAILED"]
    assert "ExitCode=75:0" in cluster.call("scontrol", "show", "job", job.number)
    assert "not requeued: submit this job again, or submit several at once" in job.log()


def test_a_job_that_never_gets_anywhere_is_not_requeued_for_ever(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = submit(
        cluster, "single.sbatch", tmp_path, command=("sh", "-c", "exit 75"), export="MAX_RESTARTS=1"
    )

    assert cluster.wait_for_end(job.number) == ["FAILED"]
    assert cluster.restarts(job.number) == 1


@pytest.mark.parametrize("script", ["single.sbatch", "multinode.sbatch", "array.sbatch"])
@pytest.mark.parametrize(("restarts", "status"), [("echo 3", 75), ("echo 2", 0), ("exit 1", 0)])
def test_a_script_on_a_node_that_was_lost_leaves_the_newer_start_of_its_job_alone(
    tmp_path: Path, script: str, restarts: str, status: int
) -> None:
    requeued = tmp_path / "requeued"
    for name, does in {
        "srun": "exit 75",
        "squeue": restarts,
        "scontrol": f'test "$1" = requeue && touch {requeued}',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": "2"}
    done = subprocess.run(
        ["bash", SCRIPTS / script, "true"],
        env={**environ, "SLURM_JOB_ID": "7", "MASTER_ADDR": "127.0.0.1"},
        check=False,
    )
    assert (done.returncode, requeued.exists()) == (status, status == 0)


def test_a_crash_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, "single.sbatch", tmp_path, ("--nodes=1",), command=("false",))

    assert cluster.wait_for_end(job.number) == ["FAILED"]
    assert cluster.restarts(job.number) == 0
