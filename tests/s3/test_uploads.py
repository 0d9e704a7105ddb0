"""Whatever is killed or fails during an upload, the mirror holds whole checkpoints only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checkfreq import KeepLast, faults
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.reader import MirrorReader
from tests.acceptance.processes import run_to_end, wait_unlocked
from tests.acceptance.programs import Run
from tests.s3.conftest import ON_BOTH
from tests.s3.program import Child, Job, expect_whole
from tests.s3.proxy import FaultProxy
from tests.s3.server import S3Server

pytestmark = [pytest.mark.s3, pytest.mark.more, pytest.mark.crash]

NUM_STEPS = 3


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digest at each boundary of an undisturbed run."""
    chk_dir = tmp_path_factory.mktemp("whole") / "chk"
    return run_to_end(Run(str(chk_dir), 6, checkpoints=False)).boundaries


def job_at(server: S3Server, prefix: str, chk_dir: Path, *, port: int | None = None) -> Job:
    """A run that removes all but the newest checkpoint from its mirror."""
    mirror = replace(server.mirror(prefix, port=port), retention=KeepLast(1))
    return Job(str(chk_dir), mirror, NUM_STEPS)


@pytest.mark.parametrize(
    ("point", "victim"),
    [(point, ("trainer", "worker")[n % 2]) for n, point in enumerate(faults.POINTS_OF_A_MIRROR)],
)
def test_a_kill_at_the_point_leaves_whole_checkpoints_and_the_run_goes_on(
    point: str, victim: str, s3: S3Server, prefix: str, tmp_path: Path, digests: dict[int, str]
) -> None:
    chk_dir = tmp_path / "chk"
    job = job_at(s3, prefix, chk_dir)
    action = "kill-peer" if victim == "trainer" else "kill-self"
    said, code = Child(replace(job, worker_faults=f"{point}:{action}")).read_all()
    assert code == (-9 if victim == "trainer" else 0), f"{point} was not reached"
    for step in MirrorReader(job.mirror).steps():
        MirrorReader(job.mirror).verify(step)

    if victim == "trainer":
        wait_unlocked(chk_dir)
        said, code = Child(job).read_all()
    assert code == 0
    assert said[-1][0] == "done"
    assert said[-1][1]["num_workers_replaced"] == (1 if victim == "worker" else 0)
    expect_whole(job.mirror, chk_dir, newest=NUM_STEPS)
    assert all(one[2] == digests[one[1]] for one in said[:-1])


def test_a_server_that_spoils_one_request_in_five_gets_everything(
    s3: S3Server, faulty: FaultProxy, prefix: str, tmp_path: Path
) -> None:
    job = replace(job_at(s3, prefix, tmp_path / "chk", port=faulty.port), num_steps=6)
    said, code = Child(job).read_all()
    assert (code, said[-1][0]) == (0, "done")
    assert faulty.num_faults > 0
    expect_whole(s3.mirror(prefix), tmp_path / "chk", newest=6)


@ON_BOTH
def test_a_new_machine_goes_on_with_the_same_bits(
    s3: S3Server, prefix: str, tmp_path: Path, digests: dict[int, str]
) -> None:
    _, code = Child(job_at(s3, prefix, tmp_path / "old")).read_all()
    assert code == 0
    job = replace(job_at(s3, prefix, tmp_path / "new"), num_steps=NUM_STEPS + 2)
    said, code = Child(job).read_all()
    assert code == 0
    assert said[0] == ("restored", NUM_STEPS, digests[NUM_STEPS])
    assert [one[1:] for one in said[1:-1]] == [
        (n, digests[n]) for n in (NUM_STEPS + 1, NUM_STEPS + 2)
    ]
    expect_whole(job.mirror, tmp_path / "new", newest=NUM_STEPS + 2)
    assert MirrorReader(job.mirror).steps() == [NUM_STEPS + 2]
    left = {key.split("/")[0] for key in RemoteObjects(job.mirror).list("")}
    assert left == {"checkpoints", "manifests", "objects"}, "the claim, or a probe, is left"
