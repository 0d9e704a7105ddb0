"""Machines that are lost at any instant, their checkpoints kept by an agent that copies files.

Each life is a new machine: it gets what the agent has, trains, and is lost at a random instant,
the agent in the middle of a file. What arrived is whole or is recognised as not: every life goes
on from the newest whole checkpoint, with the bits of its boundary. What had arrived whole in one
life, or something newer, is there in all that follow.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from checkfreq.errors import CheckFreqError
from checkfreq.store.store import CheckpointStore
from tests.acceptance.processes import DEADLINE_S, Log, Trainer, run_to_end, verify_all
from tests.acceptance.programs import Run
from tests.managed.agent import Agent, Settings, bring_back

pytestmark = [pytest.mark.crash, pytest.mark.more]

NUM_LIVES = 10
#: Files that the agent copies or removes in one life, at most.
MOST_DONE = 120


def whole_steps(chk_dir: Path) -> list[int]:
    """The steps in a directory of which every byte has arrived."""
    store = CheckpointStore(chk_dir)

    def is_whole(step: int) -> bool:
        try:
            store.verify(step)
        except CheckFreqError:
            return False
        return True

    return [step for step in store.steps() if is_whole(step)]


@dataclass
class History:
    """What all lives logged."""

    digests: dict[int, str] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    num_torn: int = 0

    def take(self, log: Log, arrived: list[int]) -> None:
        """Check a life against those before it and against what had arrived, and add its log."""
        assert max(arrived, default=0) >= max(self.resumed, default=0), "what arrived is lost"
        if log.restored is not None:
            step, digest = log.restored
            assert arrived, f"step {step} was restored, and nothing had arrived whole"
            assert step == arrived[-1], f"step {step} was restored, and {arrived} had arrived"
            assert digest == self.digests[step], f"what was restored is not step {step}"
            self.resumed.append(step)
        elif log.boundaries:
            assert not arrived, f"the run started over, and {arrived} had arrived"
            assert min(log.boundaries) == 1
        for step, digest in log.boundaries.items():
            assert self.digests.setdefault(step, digest) == digest, f"step {step} went otherwise"


def lose(chk_dir: Path, objects: Path, dice: random.Random) -> Log:
    """Train on a new machine until it is lost; what the trainer had logged."""
    pause_s = dice.choice((0.0, 0.0005, 0.004))
    settings = Settings(chk_dir, objects, dice.randrange(2**32), pause_s)
    wanted = dice.randint(1, MOST_DONE)
    deadline_s = time.monotonic() + DEADLINE_S
    run = Run(str(chk_dir), num_steps=10**9, keep_last=2, agent_copies_within_s=600.0)
    with Agent(settings) as agent:
        trainer = Trainer(run)
        while agent.count() < wanted:
            assert trainer.read_boundaries(1), "the run ended by itself"
            assert time.monotonic() < deadline_s, "the agent copied nothing"
        time.sleep(dice.uniform(0.0, 0.01))
        agent.kill()
        trainer.kill_worker()
        trainer.kill()
    assert trainer.finish() == -9
    return trainer.log


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_every_life_goes_on_from_the_newest_checkpoint_that_arrived_whole(
    seed: int, tmp_path: Path
) -> None:
    dice, history = random.Random(seed), History()
    objects = tmp_path / "objects"
    objects.mkdir()
    for number in range(NUM_LIVES):
        chk_dir = tmp_path / f"machine-{number}" / "checkpoints"
        bring_back(objects, chk_dir, seed=dice.randrange(2**32))
        arrived = whole_steps(chk_dir)
        history.num_torn += len(CheckpointStore(chk_dir).steps()) - len(arrived)
        history.take(lose(chk_dir, objects, dice), arrived)

    chk_dir = tmp_path / "last" / "checkpoints"
    bring_back(objects, chk_dir, seed=0)
    arrived = whole_steps(chk_dir)
    last = max(history.digests) + 3
    final = run_to_end(Run(str(chk_dir), last, keep_last=2, agent_copies_within_s=600.0))

    history.take(final, arrived)
    whole = run_to_end(Run(str(tmp_path / "whole"), last, checkpoints=False))
    assert history.digests == whole.boundaries
    assert verify_all(chk_dir)[-1] == last
    assert len(history.resumed) >= 3, "hardly anything ever arrived"
    assert history.num_torn > 0, "nothing ever arrived in part"
