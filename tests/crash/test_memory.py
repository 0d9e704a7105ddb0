"""A killed run starts again from the memory that its worker keeps, never from worse than the disk.

The scenario is that of the kill matrix, with one timeline: each boundary has a checkpoint, and a
run that was interrupted any number of times logs the bits of one that was not.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from checkfreq.persist import handover
from checkfreq.persist.handover import Offer
from checkfreq.store.store import CheckpointStore
from tests.acceptance.processes import (
    DEADLINE_S,
    Log,
    Trainer,
    run_to_end,
    verify_all,
)
from tests.acceptance.programs import Run

pytestmark = [pytest.mark.crash, pytest.mark.more]

NUM_STEPS = 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digest at each boundary of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    return run_to_end(Run(str(folder / "chk"), NUM_STEPS, checkpoints=False)).boundaries


@pytest.fixture
def chk_dir(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint directory; nothing that lingers there outlives the test."""
    yield tmp_path / "chk"
    handover.release_all(tmp_path / "chk")


def run_in(chk_dir: Path, **changes: object) -> Run:
    settings: dict[str, object] = {"keep_in_memory_s": 300.0, "takeover_s": 120.0}
    return Run(str(chk_dir), NUM_STEPS, **{**settings, **changes})  # type: ignore[arg-type]


def killed(run: Run, *, after: int = 3) -> Log:
    """Train, and SIGKILL the trainer ``after`` some boundaries, all but the last durable."""
    trainer = Trainer(replace(run, waits=True))
    assert trainer.read_boundaries(after)
    trainer.kill()
    assert trainer.finish() == -9
    return trainer.log


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} did not come"
        time.sleep(0.005)


def offered(chk_dir: Path) -> Offer:
    """What the worker of a killed run offers, once it listens and has written all it had."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        offer = handover.ask(chk_dir, 0, world=1)
        if offer is not None and not offer.body.in_flight:
            return offer
        if offer is not None:
            offer.close()
        assert time.monotonic() < deadline_s, "no worker offers what it holds"
        time.sleep(0.01)


def steps_in_flight(chk_dir: Path) -> list[int]:
    """What the worker of a killed run is still writing."""
    deadline_s = time.monotonic() + DEADLINE_S
    while (offer := handover.ask(chk_dir, 0, world=1)) is None:
        assert time.monotonic() < deadline_s, "no worker offers what it holds"
        time.sleep(0.01)
    with offer:
        return [one.step for one in offer.body.in_flight]


def expect_end(chk_dir: Path, log: Log, whole: dict[int, str]) -> None:
    """A run that was restored trained on to the end of the whole run, bit for bit."""
    assert log.restored is not None
    step, digest = log.restored
    assert whole[step] == digest
    assert log.boundaries == {n: bits for n, bits in whole.items() if n > step}
    assert verify_all(chk_dir)[-1] == NUM_STEPS


def test_a_snapshot_that_was_not_durable_yet_is_restored_while_it_is_written(
    chk_dir: Path, tmp_path: Path, whole: dict[int, str]
) -> None:
    gate = tmp_path / "gate"
    trainer = Trainer(run_in(chk_dir, worker_faults=f"commit.rename:pause-{gate}:3"))
    wait_for(Path(f"{gate}.reached"))
    trainer.kill()
    assert trainer.finish() == -9
    durable = CheckpointStore(chk_dir).steps()
    assert len(durable) == 2

    again = Trainer(run_in(chk_dir))
    step, digest = again.read_restored()
    assert step > durable[-1]
    assert digest == whole[step]
    assert again.log.source == "memory"
    assert CheckpointStore(chk_dir).steps() == durable
    gate.touch()

    assert again.finish() == 0
    expect_end(chk_dir, again.log, whole)
    assert again.log.stats is not None
    assert again.log.stats["num_failed"] == 0
    assert again.log.stats["last_durable_step"] == NUM_STEPS


def test_an_older_step_that_is_asked_for_sets_aside_what_is_still_being_written(
    chk_dir: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    run = run_in(chk_dir, keep_last=NUM_STEPS, worker_faults=f"commit.rename:pause-{gate}:3")
    trainer = Trainer(run)
    wait_for(Path(f"{gate}.reached"))
    trainer.kill()
    assert trainer.finish() == -9

    # It ends with a step that was being written: that one is of the other timeline.
    end = max(steps_in_flight(chk_dir))
    once_more = run_in(chk_dir, keep_last=NUM_STEPS, restore_step=1, timeline=2)
    again = Trainer(replace(once_more, num_steps=end))
    assert again.read_restored()[0] == 1
    assert again.read_boundaries(end - 1)
    gate.touch()
    assert again.finish() == 0

    last = run_to_end(run_in(chk_dir))
    assert last.restored == (end, again.log.boundaries[end])
    verify_all(chk_dir)


def test_the_same_step_of_a_different_attempt_is_read_from_disk(
    chk_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    line = run_to_end(Run(str(other), NUM_STEPS, timeline=2)).boundaries
    killed(run_in(chk_dir))
    with offered(chk_dir) as offer:
        newest = max(one.step for one in offer.body.snapshots)
    for step in CheckpointStore(chk_dir).steps():
        shutil.rmtree(chk_dir / f"step-{step:08d}")
    run_to_end(Run(str(tmp_path / "third"), newest, timeline=2))
    name = f"step-{newest:08d}"
    shutil.copytree(tmp_path / "third" / name, chk_dir / name)
    log = run_to_end(run_in(chk_dir))
    assert log.source == "directory"
    assert log.restored == (newest, line[newest])


def test_runs_killed_at_random_instants_end_with_the_same_bits(
    chk_dir: Path, whole: dict[int, str]
) -> None:
    dice = random.Random(16)
    durable = 0
    for _ in range(8):
        trainer = Trainer(run_in(chk_dir))
        if dice.random() < 0.7:
            trainer.read_boundaries(dice.randrange(0, 2))
        for _ in range(int(10 ** dice.uniform(1.0, 6.0))):
            pass
        if dice.random() < 0.2:
            trainer.kill_worker()
        trainer.kill()
        trainer.finish()
        if trainer.log.restored is not None:
            step, digest = trainer.log.restored
            assert whole[step] == digest
            assert step >= durable
        durable = max([durable, *trainer.log.durable])
    log = run_to_end(run_in(chk_dir))
    if log.restored is not None and log.restored[0] < NUM_STEPS:
        assert log.boundaries[NUM_STEPS] == whole[NUM_STEPS]
    assert verify_all(chk_dir)[-1] == NUM_STEPS
