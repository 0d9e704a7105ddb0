"""SIGKILL while checkpoints share the file of a frozen base: as safe as with files of their own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkfreq import faults
from tests.acceptance.processes import Trainer, run_to_end, verify_all, wait_unlocked, wait_until
from tests.acceptance.programs import Run
from tests.acceptance.sizes import sized

pytestmark = pytest.mark.crash

NUM_STEPS, MANY_STEPS = 8, 40
#: The second pass: the first checkpoint has nothing to share a file with.
POINTS = (
    *faults.POINTS_OF_A_LINK,
    "snapshot.copy_settled",
    "socket.send",
    "commit.mkdir",
    "commit.sync_temp_dir",
    "commit.rename",
    "commit.pointer",
    "slot.release",
    "prune.rename",
    "prune.remove",
)


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, str]]:
    """Of the state at each boundary of an undisturbed run."""
    root = tmp_path_factory.mktemp("whole")
    return run_to_end(Run(str(root), MANY_STEPS, frozen=True, checkpoints=False)).boundaries


@pytest.mark.parametrize(
    ("point", "victim"),
    sized(
        itertools.product(POINTS, ("trainer", "worker", "both")),
        smoke={("commit.link", "both"), ("prune.remove", "trainer")}.__contains__,
    ),
)
def test_a_kill_at_the_point_costs_nothing_that_was_acknowledged(
    point: str, victim: str, digests: dict[int, str], tmp_path: Path
) -> None:
    by_trainer = point.startswith(("snapshot.", "socket.", "slot."))
    is_self = by_trainer == (victim == "trainer")
    action = "kill-both" if victim == "both" else "kill-self" if is_self else "kill-peer"
    script = {"trainer_faults" if by_trainer else "worker_faults": f"{point}:{action}:2"}
    run = Run(str(tmp_path / "chk"), NUM_STEPS, keep_last=1, frozen=True)
    trainer = Trainer(Run(**{**vars(run), **script}))

    code = trainer.finish()

    assert code == (0 if victim == "worker" else -9), f"{point} was not reached"
    wait_unlocked(tmp_path / "chk")
    steps = verify_all(tmp_path / "chk")
    if trainer.log.durable:
        assert steps[-1] >= max(trainer.log.durable)
    after = run_to_end(run)
    if after.restored is not None:
        assert after.restored == (steps[-1], digests[steps[-1]])
    assert {**trainer.log.boundaries, **after.boundaries}.items() <= digests.items()
    assert verify_all(tmp_path / "chk")[-1] == NUM_STEPS
    final = run_to_end(run).restored
    assert final == (NUM_STEPS, digests[NUM_STEPS])


def test_what_a_killed_run_left_in_memory_has_the_frozen_base(
    digests: dict[int, str], tmp_path: Path
) -> None:
    """Its slot got the base several snapshots before the one that is restored."""
    run = Run(str(tmp_path / "chk"), MANY_STEPS, frozen=True, keep_in_memory_s=300.0)
    faulty = {"trainer_faults": "slot.release:kill-self:5", "waits": True}
    first = Trainer(Run(**{**vars(run), **faulty}))
    assert first.finish() == -9
    wait_until((tmp_path / "chk" / ".memory-0.sock").exists, "nobody offers the memory")
    after = run_to_end(run)
    assert after.source == "memory"
    assert after.restored is not None
    assert digests[after.restored[0]] == after.restored[1]
    assert after.boundaries.items() <= digests.items()
    wait_unlocked(tmp_path / "chk")
    assert verify_all(tmp_path / "chk")[-1] == MANY_STEPS
