"""``checkfreq run`` in a job: it sees to crashes, and SLURM to the rest."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Job, submit, trainer

pytestmark = [pytest.mark.slurm, pytest.mark.more, pytest.mark.slow]


def trainers(folder: Path) -> list[int]:
    """The processes that train into a folder, without those that started them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        names = {b"tests.slurm.trainer", str(folder / "chk").encode()}
        if names <= set(words) and b"checkfreq.cli" not in words and b"python" in words[0]:
            found.append(int(path.parent.name))
    return found


def test_a_killed_script_starts_again_in_its_job_and_a_stopped_one_in_the_next(
    cluster: Cluster, tmp_path: Path, uninterrupted: Job
) -> None:
    command = [sys.executable, "-m", "checkfreq.cli", "run", "--", *trainer(tmp_path, 2)]
    job = submit(cluster, "single.sbatch", tmp_path, command=command)
    job.wait_for_run(1)

    (training,) = trainers(tmp_path)
    os.kill(training, signal.SIGKILL)
    job.wait_for_run(2)
    assert cluster.restarts(job.number) == 0
    cluster.signal_script(job.number)

    assert cluster.wait_for_end(job.number) == ["COMPLETED"], job.log()
    assert cluster.restarts(job.number) == 1
    assert len(job.starts()) == 3
    assert job.stops() == job.starts()[2:]
    assert "restart 1 after exit by SIGKILL at step" in job.log()
    assert "stopped: exit status 75 at step" in job.log()
    assert job.result() == uninterrupted.result()
