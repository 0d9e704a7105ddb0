"""SIGKILL of trainer, worker or both, at every fault point and at random instants.

The scenario: a run left checkpoints of steps 1 to 3 (timeline 1). A second one restores step 1
and goes on as timeline 2, keeping only the newest checkpoint, so that its first commit
supersedes steps 2 and 3 and later ones prune. It is killed; a third restores what is there.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkfreq import CFCheckpoint, CFManager, CFMode, faults
from tests.acceptance.processes import (
    Log,
    Trainer,
    run_to_end,
    verify_all,
    wait_unlocked,
    worker_pid,
)
from tests.acceptance.programs import Run, Training
from tests.acceptance.sizes import sized

pytestmark = pytest.mark.crash

SEEDED_STEPS = 3
FIRST_STEP = 2
NUM_STEPS = 10
POINTS = faults.POINTS_OF_ONE_RANK
#: From here on the worker holds a complete snapshot: the trainer is not needed any more.
HANDED_OVER = POINTS[POINTS.index("worker.receive") :]
VICTIMS = ("trainer", "worker", "both")
SMOKE = {
    ("snapshot.copy_settled", "trainer"),
    ("commit.write", "both"),
    ("commit.sync_temp_dir", "trainer"),
    ("commit.supersede", "both"),
    ("commit.rename", "worker"),
    ("commit.rename", "both"),
    ("worker.reply", "both"),
    ("prune.remove", "both"),
}


@dataclass(frozen=True)
class Scenario:
    """The directory that each case copies, and what undisturbed runs logged."""

    seeded: Path
    #: Per timeline, the digest at each boundary.
    digests: dict[int, dict[int, str]]

    def case(self, chk_dir: Path) -> Run:
        """The disturbed run, in a directory of its own."""
        shutil.copytree(self.seeded, chk_dir)
        return Run(str(chk_dir), NUM_STEPS, keep_last=1, restore_step=FIRST_STEP - 1, timeline=2)

    def timeline_of(self, step: int, digest: str) -> int:
        """The timeline that had this state at this boundary."""
        found = [line for line, logged in self.digests.items() if logged.get(step) == digest]
        assert found, f"the state restored as step {step} was no boundary's"
        return found[0]


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    root = tmp_path_factory.mktemp("kill")
    whole = run_to_end(Run(str(root / "whole"), NUM_STEPS, checkpoints=False))
    seeded = run_to_end(Run(str(root / "seeded"), SEEDED_STEPS))
    assert seeded.boundaries.items() <= whole.boundaries.items(), "training is not deterministic"
    shutil.copytree(root / "seeded", root / "second")
    run = Run(str(root / "second"), NUM_STEPS, restore_step=FIRST_STEP - 1, timeline=2)
    return Scenario(root / "seeded", {1: whole.boundaries, 2: run_to_end(run).boundaries})


@pytest.fixture(scope="module")
def passes(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often an undisturbed run of the scenario passes each point."""
    root = tmp_path_factory.mktemp("log")
    run = scenario.case(root / "chk")
    log = root / "points"
    run_to_end(Run(**{**vars(run), "fault_log": str(log)}))
    reached = log.read_text().split()
    return {point: reached.count(point) for point in POINTS}


@pytest.mark.parametrize("point", POINTS)
def test_an_undisturbed_run_passes_the_point(point: str, passes: dict[str, int]) -> None:
    assert passes[point] >= 1


@pytest.mark.parametrize(
    ("point", "victim"), sized(itertools.product(POINTS, VICTIMS), smoke=SMOKE.__contains__)
)
def test_a_kill_at_the_point_leaves_a_state_that_was_reached_and_loses_nothing_acknowledged(
    point: str, victim: str, scenario: Scenario, tmp_path: Path
) -> None:
    run = scenario.case(tmp_path / "chk")
    trainer = Trainer(Run(**{**vars(run), **_scripts(point, victim)}))

    code = trainer.finish()

    if victim == "worker":
        _expect_trained_on(code, trainer.log, scenario)
    else:
        assert code == -9, f"{point} was not reached before the end of the run"
    wait_unlocked(tmp_path / "chk")
    steps = verify_all(tmp_path / "chk")
    after = run_to_end(Run(run.chk_dir, NUM_STEPS))
    assert after.restored is not None
    timeline = scenario.timeline_of(*after.restored)
    assert after.restored[0] == steps[-1]
    if trainer.log.durable:
        assert timeline == 2
        assert after.restored[0] >= max(trainer.log.durable)
    if victim == "trainer" and point in HANDED_OVER:
        assert timeline == 2, "the worker did not commit the snapshot it held"
        assert after.restored[0] >= FIRST_STEP
    assert verify_all(tmp_path / "chk")[-1] == NUM_STEPS
    if after.restored[0] < NUM_STEPS:
        assert after.boundaries[NUM_STEPS] == scenario.digests[timeline][NUM_STEPS]


def _scripts(point: str, victim: str) -> dict[str, str]:
    by_trainer = point.startswith(("snapshot.", "socket.", "slot."))
    if victim == "both":
        action = "kill-both"
    else:
        action = "kill-self" if by_trainer == (victim == "trainer") else "kill-peer"
    return {"trainer_faults" if by_trainer else "worker_faults": f"{point}:{action}"}


def _expect_trained_on(code: int, log: Log, scenario: Scenario) -> None:
    assert code == 0
    assert log.boundaries == {
        step: digest for step, digest in scenario.digests[2].items() if step >= FIRST_STEP
    }
    assert log.stats is not None
    assert log.stats["num_workers_replaced"] == 1
    assert log.stats["num_failed"] == 0
    assert log.stats["last_durable_step"] == NUM_STEPS


def test_a_worker_killed_before_the_first_checkpoint_is_replaced(tmp_path: Path) -> None:
    training = Training()
    with CFManager(
        tmp_path / "chk",
        CFCheckpoint(**training.tracked()),
        mode=CFMode.MANUAL,
        chk_freq=1,
    ) as manager:
        os.kill(worker_pid(tmp_path / "chk"), signal.SIGKILL)
        assert not manager.restore()
        training.update(manager)
        manager.step()
        assert manager.stats()["num_workers_replaced"] == 1
    assert verify_all(tmp_path / "chk") == [1]


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_instants_never_lose_or_mix_anything(seed: int, tmp_path: Path) -> None:
    """25 kills in a row in one directory, each run continuing from what the last one left."""
    history = _History()
    instants = _Instants(seed)
    for _ in range(25):
        trainer = Trainer(Run(str(tmp_path / "chk"), num_steps=10**9))
        while not instants.strike(trainer):
            pass  # only its worker was killed: it must go on
        assert trainer.finish() == -9
        history.take(trainer.log)
    last = max(history.digests, default=0) + 3

    final = run_to_end(Run(str(tmp_path / "chk"), last))

    history.take(final)
    whole = run_to_end(Run(str(tmp_path / "whole"), last, checkpoints=False))
    assert history.digests == whole.boundaries
    assert verify_all(tmp_path / "chk")[-1] == last


class _Instants:
    """Seeded random instants of SIGKILL, from process start to some boundaries later."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def strike(self, trainer: Trainer) -> bool:
        """Kill trainer, worker or both at the next instant; True if the trainer was killed."""
        if self._random.random() < 0.85:
            assert trainer.read_boundaries(self._random.randint(1, 8)), "the run ended by itself"
            time.sleep(self._random.uniform(0.0, 0.02))
        else:
            time.sleep(self._random.uniform(0.0, 0.6))
        victim = self._random.choice(VICTIMS)
        if victim != "trainer":
            trainer.kill_worker()
        if victim != "worker":
            trainer.kill()
        return victim != "worker"


class _History:
    """Everything that the runs in one directory logged."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}
        self._durable = 0

    def take(self, log: Log) -> None:
        """Check a run against those before it, and add its log."""
        if log.restored is not None:
            step, digest = log.restored
            assert digest == self.digests[step], f"what was restored is not step {step}"
            assert step >= self._durable, f"step {self._durable} was acknowledged and is lost"
        elif log.boundaries:
            assert self._durable == 0, "the run started over"
        for step, digest in log.boundaries.items():
            assert self.digests.setdefault(step, digest) == digest, f"step {step} went otherwise"
        self._durable = max([self._durable, *log.durable])


@pytest.fixture(autouse=True)
def _no_leftovers(tmp_path: Path) -> Iterator[None]:
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)
