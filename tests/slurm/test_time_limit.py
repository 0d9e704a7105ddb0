"""Jobs that run into their time limit: a real SLURM, with its real clock."""

from __future__ import annotations

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Job

pytestmark = [pytest.mark.slurm, pytest.mark.more, pytest.mark.slow]


def test_two_ranks_under_a_time_limit_finish_as_if_they_had_none(
    cluster: Cluster, long_jobs: dict[str, Job], uninterrupted_two: Job
) -> None:
    job = long_jobs["multinode"]
    assert cluster.wait_for_end(job.number) == ["COMPLETED"], job.log()
    assert_same(job, uninterrupted_two)
    assert job.starts() == job.starts(rank=1)


def test_a_job_that_only_has_a_time_limit_finishes_as_if_it_had_none(
    cluster: Cluster, long_jobs: dict[str, Job], uninterrupted: Job
) -> None:
    job = long_jobs["bare"]
    assert cluster.wait_for_end(job.number) == ["COMPLETED"], job.log()
    assert_same(job, uninterrupted)
    assert {*job.stops("signal")} == {"slurm"}
    assert f"SLURM job {job.number} is requeued" in job.log()
    assert "cannot requeue" not in job.log()


def assert_same(job: Job, uninterrupted: Job) -> None:
    """At least three runs, each from where one before stopped; every sample once; same bits.

    A signal may come before a run's first boundary, or after the last: then a run adds nothing.
    """
    starts, stops, end = job.starts(), job.stops(), job.newest()
    assert len(starts) >= 3, job.log()
    assert starts == sorted(starts)
    assert {*starts} - {0, end} == {*stops} - {end}
    result = job.result()
    assert {times for epoch in result["counts"] for times in epoch} == {1}
    assert result == uninterrupted.result()
