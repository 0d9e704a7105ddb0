"""A node that SLURM has lost goes on training, while the job starts again on another one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.required import require
from tests.slurm.cluster import Cluster, started, wait_until, why_not
from tests.slurm.jobs import Job, bare

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


@pytest.fixture
def losable(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of its own, whose first node a test may take away."""
    if reason := why_not():
        require("slurm", reason)
    with started(tmp_path / "slurm") as running:
        yield running
        for left in trainers(tmp_path / "job"):
            os.kill(left, signal.SIGKILL)


def lose_first_node(cluster: Cluster) -> None:
    """The controller hears no more of it, and gives it up; what runs there runs on."""
    os.kill(int((cluster.folder / "n1.pid").read_text()), signal.SIGKILL)
    cluster.call("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=lost")


def test_the_run_on_a_lost_node_stops_and_later_starts_come_back_until_it_has(
    losable: Cluster, tmp_path: Path, uninterrupted: Job
) -> None:
    soon = ("--takeover-s=0.1",)
    job = bare(losable, tmp_path / "job", "--time=2", slow_runs=1, more=soon)
    job.wait_for_run(1)
    (orphan,) = trainers(job.folder)

    os.kill(orphan, signal.SIGSTOP)
    lose_first_node(losable)
    wait_until(lambda: losable.restarts(job.number) >= 2, job.log)
    os.kill(orphan, signal.SIGCONT)

    assert losable.wait_for_end(job.number) == ["COMPLETED"], job.log()
    assert "still locked by the persist worker" in job.log()
    assert f"process {orphan} on host" in job.log()
    assert f"(SLURM job {job.number}, start 0, step 0, task 0)" in job.log()
    events = (job.chk_dir / "events.jsonl").read_text()  # nothing that it prints comes back
    assert f"SLURM has taken job {job.number} from this node" in events
    assert job.stops() == job.starts()[1:]
    assert job.result() == uninterrupted.result()
