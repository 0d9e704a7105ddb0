"""A job with a mirror whose server hangs: it is requeued all the same, and then finishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkfreq.mirror.reader import MirrorReader
from tests.s3.proxy import Fault, FaultProxy
from tests.s3.server import running
from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.jobs import Job, bare

pytestmark = [pytest.mark.slurm, pytest.mark.s3, pytest.mark.more, pytest.mark.slow]


def test_a_job_is_requeued_before_its_upload_is_waited_for(
    cluster: Cluster, tmp_path: Path, uninterrupted: Job
) -> None:
    is_away = False

    def plan(method: str, path: str) -> Fault:
        return Fault.HANG if is_away and method == "PUT" else Fault.NONE

    with running(tmp_path) as server, FaultProxy(server.port, plan).listening() as proxy:
        source = MirrorReader(server.mirror("job"))
        variables = server.variables(port=proxy.port)
        export = ",".join(f"{name}={value}" for name, value in variables.items())
        arguments = ("--mirror", source.name)
        job = bare(cluster, tmp_path, slow_runs=1, more=arguments, export=export)
        job.wait_for_run(1)
        wait_until(lambda: bool(source.steps()), job.log)
        is_away = True

        cluster.call("scancel", "--signal=USR1", job.number)

        wait_until(lambda: cluster.restarts(job.number) == 1, job.log)
        is_away = False
        assert cluster.wait_for_end(job.number) == ["COMPLETED"], job.log()
        assert job.starts() == [0, *job.stops()]
        assert job.result() == uninterrupted.result()
        assert source.steps()[-1] == job.newest()
