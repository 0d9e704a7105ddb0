"""Jobs that ask SLURM when they end, and requeue themselves, without a signal or a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.jobs import bare

pytestmark = [pytest.mark.slurm, pytest.mark.more, pytest.mark.slow]


def test_two_tasks_that_do_not_know_of_each_other_are_told_of_ranks(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = bare(cluster, tmp_path, "--ntasks=2", slow_runs=1)
    wait_until(lambda: "without RANK and WORLD_SIZE" in job.log(), job.log)
    job.wait_for_run(1)  # the one that came first trains alone

    wait_until(lambda: "Exited with exit code 1" in job.log(), job.log)
    assert "srun started this script 2 times" in job.log()
    cluster.call("scancel", job.number)


def test_a_job_that_may_not_be_requeued_says_how_to_go_on(cluster: Cluster, tmp_path: Path) -> None:
    job = bare(cluster, tmp_path, "--no-requeue", slow_runs=1)
    job.wait_for_run(1)

    cluster.call("scancel", "--signal=USR1", job.number)

    assert cluster.wait_for_end(job.number) == ["FAILED"]
    assert f"sbatch --dependency=afterany:{job.number}" in job.log()
