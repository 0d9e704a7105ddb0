"""One SLURM for all tests of a session, jobs that take long, and what they are compared with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.required import require
from tests.slurm.cluster import DEADLINE_S, ROOT, Cluster, free_ports, started, why_not
from tests.slurm.jobs import Job, bare, submit


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running SLURM; the test skips where there is none, or fails where there must be one."""
    if reason := why_not():
        require("slurm", reason)
    with started(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="session")
def long_jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Jobs that wait for real time limits; they run while other tests do."""
    folder = tmp_path_factory.mktemp("long")
    two = ("--time=1", "--signal=USR1@5", "--nodes=2", "--ntasks-per-node=1")
    return {
        "multinode": submit(cluster, "multinode.sbatch", folder / "two", two, slow_runs=2),
        "bare": bare(
            cluster, folder / "bare", "--time=1", slow_runs=2, export=slow_scontrol(folder)
        ),
    }


def slow_scontrol(folder: Path) -> str:
    """A variable with which ``scontrol`` returns after SLURM has begun to end the job."""
    path = folder / "bin" / "scontrol"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\n{shutil.which("scontrol")} "$@" && sleep 2\n')
    path.chmod(0o755)
    return f"PATH={path.parent}:{os.environ['PATH']}"


@pytest.fixture(scope="session", autouse=True)
def _long_jobs_run_beside_other_tests(request: pytest.FixtureRequest) -> None:
    """Where one process runs all tests; otherwise the files run side by side anyway."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        request.getfixturevalue("long_jobs")


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run that is never told to stop, outside SLURM."""
    return _run_through(tmp_path_factory.mktemp("uninterrupted"), ranks=1)


@pytest.fixture(scope="session")
def uninterrupted_two(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same on two ranks."""
    return _run_through(tmp_path_factory.mktemp("uninterrupted-two"), ranks=2)


def _run_through(folder: Path, *, ranks: int) -> Job:
    job = Job("0", folder)
    port = str(free_ports(1)[0])
    base = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "tests.slurm.trainer", str(job.chk_dir)]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**base, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(DEADLINE_S) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return job
