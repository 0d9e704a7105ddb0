"""The job scripts of benchmarks/slurm: who is requeued, and who is not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, SCRIPTS, Cluster, wait_until
from tests.slurm.jobs import Job, submission, submit, trainer

pytestmark = [pytest.mark.slurm, pytest.mark.more, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _long_jobs_have_begun(long_jobs: dict[str, Job]) -> None:
    """They wait for the clock while these tests run."""


def tell_to_stop(cluster: Cluster, job: Job) -> None:
    """What SLURM does before the limit, at once: the signal of ``--signal=B:USR1``."""
    cluster.call("scancel", "--batch", "--signal=USR1", job.number)


def ends(cluster: Cluster, job: Job) -> list[str]:
    return cluster.wait_for_end(job.number)


def test_a_preempted_job_stops_within_its_grace_and_comes_back(
    cluster: Cluster, tmp_path: Path, uninterrupted: Job
) -> None:
    half = ("--cpus-per-task=40", "--time=60")
    job = submit(cluster, "single.sbatch", tmp_path / "job", ("-p", "spot", *half), slow_runs=1)
    job.wait_for_run(1)

    urgent = ("sbatch", "--parsable", "--mem=100", "--output=/dev/null", "-p", "prio", *half)
    above = cluster.call(*urgent, "--wrap=true")

    assert cluster.wait_for_end(above) == ["COMPLETED"]
    assert ends(cluster, job) == ["COMPLETED"], job.log()
    assert cluster.restarts(job.number) == 1
    assert job.stops("signal") == ["SIGTERM"]
    assert job.stops() == job.starts()[1:]
    assert job.result() == uninterrupted.result()


def test_a_signal_before_the_imports_are_done_loses_a_run_but_no_checkpoint(
    cluster: Cluster, tmp_path: Path, uninterrupted: Job
) -> None:
    command = trainer(tmp_path, 0)
    command[command.index("tests.slurm.trainer")] = "tests.slurm.late_start"
    job = submit(cluster, "single.sbatch", tmp_path, command=command)
    wait_until(lambda: (tmp_path / "chk.begun").exists(), job.log)

    tell_to_stop(cluster, job)

    assert ends(cluster, job) == ["COMPLETED"], job.log()
    assert cluster.restarts(job.number) == 1
    assert "User defined signal 1" in job.log()
    assert job.result() == uninterrupted.result()


def test_loader_workers_that_get_the_signal_too_do_not_fail_the_run(
    cluster: Cluster, tmp_path: Path, uninterrupted: Job
) -> None:
    command = [*trainer(tmp_path, 1), "--workers=2"]
    job = submit(cluster, "single.sbatch", tmp_path, command=command)
    job.wait_for_run(1)

    tell_to_stop(cluster, job)

    assert ends(cluster, job) == ["COMPLETED"], job.log()
    assert job.stops() == job.starts()[1:]
    assert job.result() == uninterrupted.result()


def test_a_cancelled_job_saves_its_last_iteration_and_stays_away(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = submit(cluster, "single.sbatch", tmp_path, slow_runs=1)
    job.wait_for_run(1)

    cluster.call("scancel", job.number)

    assert ends(cluster, job) == ["CANCELLED"], job.log()
    wait_until(lambda: bool(job.stops()), job.log)
    assert [job.newest()] == job.stops()
    assert cluster.restarts(job.number) == 0


def test_where_requeueing_is_forbidden_the_log_says_what_to_do(
    cluster: Cluster, tmp_path: Path, uninterrupted: Job
) -> None:
    job = submit(cluster, "single.sbatch", tmp_path, ("--no-requeue",), slow_runs=1)
    job.wait_for_run(1)

    tell_to_stop(cluster, job)

    assert ends(cluster, job) == ["FAILED"]
    assert "ExitCode=75:0" in cluster.call("scontrol", "show", "job", job.number)
    assert "not requeued: submit this job again, or submit several at once" in job.log()
    again = submit(cluster, "single.sbatch", tmp_path, ("--no-requeue",), slow_runs=1)
    assert ends(cluster, again) == ["COMPLETED"], again.log()
    assert job.result() == uninterrupted.result()


def test_a_job_that_never_gets_anywhere_is_not_requeued_for_ever(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = submit(
        cluster, "single.sbatch", tmp_path, command=("sh", "-c", "exit 75"), export="MAX_RESTARTS=1"
    )

    assert ends(cluster, job) == ["FAILED"]
    assert cluster.restarts(job.number) == 1


@pytest.mark.parametrize("script", ["single.sbatch", "multinode.sbatch", "array.sbatch"])
def test_a_crash_is_not_requeued(cluster: Cluster, tmp_path: Path, script: str) -> None:
    one = ("--nodes=1", *(["--array=0"] if "array" in script else []))
    job = submit(cluster, script, tmp_path, one, command=("false",))

    assert ends(cluster, job) == ["FAILED"]
    assert cluster.restarts(job.number) == 0


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
    assert len(first.starts()) == 1
    cluster.call("scancel", "--signal=USR1", first.number)

    assert ends(cluster, array) == ["COMPLETED", "COMPLETED"], array.log()
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

    tell_to_stop(cluster, jobs[0])

    assert [ends(cluster, job) for job in jobs[:2]] == [["FAILED"], ["COMPLETED"]], jobs[0].log()
    assert ends(cluster, jobs[2]) == ["CANCELLED"]
    assert len(jobs[0].starts()) == 2
    assert jobs[0].result() == uninterrupted.result()


def test_the_chain_says_how_it_is_used(cluster: Cluster) -> None:
    done = subprocess.run(
        [SCRIPTS / "chain.sh"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 2
    assert "chain.sh COUNT" in done.stdout
