"""Several jobs of one script: arrays, whose tasks go their own ways, and chains of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import SCRIPTS, Cluster
from tests.slurm.jobs import Job, submission, submit, trainer

pytestmark = [pytest.mark.slurm, pytest.mark.more, pytest.mark.slow]


def test_each_task_of_an_array_is_requeued_by_itself(
    cluster: Cluster, tmp_path: Path, uninterrupted: Job
) -> None:
    array = submit(
        cluster, "array.sbatch", tmp_path, ("--array=0-1",), command=trainer(tmp_path, 1, into="")
    )
    first, last = (Job(f"{array.number}_{name}", tmp_path, name) for name in ("0", "1"))
    first.wait_for_run(1)
    last.wait_for_run(1)

    cluster.call("scancel", "--signal=USR1", last.number)  # this one has the array's number
    last.wait_for_run(2)
    assert cluster.restarts(first.number) == 0
    cluster.call("scancel", "--signal=USR1", first.number)

    assert cluster.wait_for_end(array.number) == ["COMPLETED", "COMPLETED"], array.log()
    for task in (first, last):
        assert len(task.starts()) == 2
        assert task.result() == uninterrupted.result()


def test_a_chain_of_jobs_goes_on_where_the_one_before_stopped(
    cluster: Cluster, tmp_path: Path, uninterrupted: Job
) -> None:
    chain = str(SCRIPTS / "chain.sh")
    script = [str(SCRIPTS / "single.sbatch"), *trainer(tmp_path, 1)]
    numbers = cluster.call(chain, "3", *submission(tmp_path), *script).split()
    jobs = [Job(number, tmp_path) for number in numbers]
    jobs[0].wait_for_run(1)

    cluster.signal_script(jobs[0].number)

    assert [cluster.wait_for_end(job.number) for job in jobs[:2]] == [["FAILED"], ["COMPLETED"]], (
        jobs[0].log()
    )
    assert cluster.wait_for_end(jobs[2].number) == ["CANCELLED"]
    assert "not requeued" not in jobs[0].log()  # as it is meant to be
    assert len(jobs[0].starts()) == 2
    assert jobs[0].result() == uninterrupted.result()
