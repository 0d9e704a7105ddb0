"""The killer of runs under other libraries' loops: one life whole, then others with SIGKILLs.

A program reports that it has ``begun``; the step it ``restored``; each ``event``, with the updates
made before, and the bits; and its ``end``. What each life of each rank reports must be a piece of
what the same rank reports in the whole run, without a gap, from the step it restored.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.acceptance.ranks import Heard, Life, Rank, Ranks, run_well

logger = logging.getLogger(__name__)

#: What happened, the updates made before, and the bits: sample ids, losses, metrics.
Event = tuple[str, int, Any]

NUM_KILLS = 5
#: Where the machine is so slow that too few lives have something to resume.
MOST_KILLS = 24


def run_killed(
    program: Callable[[Rank], None], folder: Path, *, world: int = 1, seed: int = 0, **settings: Any
) -> list[list[Event]]:
    """Kill ``program`` at random instants and compare; returns each rank's events, never killed."""
    ended = run_well(Life(program, _made(folder / "whole"), world, settings=settings))
    whole = [heard.all("event") for heard in ended]
    dice = random.Random(f"{settings}{seed}")
    reached, num_resumed, number = 0, 0, 0
    # How many have something to resume depends on the disk, and on what ranks agree on.
    enough = 3 if world == 1 else 1
    is_killed = True
    while is_killed:
        number += 1
        # Generators of a life that has something to restore have another seed: what it shares
        # with the run before is luck no more.
        life = Life(program, _made(folder / "killed"), world, number, reached and number, settings)
        is_killed = number <= NUM_KILLS or (num_resumed < enough and number <= MOST_KILLS)
        heard = _killed(life, dice, whole[0]) if is_killed else run_well(life)
        step = _check(heard, whole)
        num_resumed += bool(step)
        reached = max(reached, step)
        logger.info("life %d restored step %d", number, step)
    for rank, one in enumerate(heard):
        assert one.last("end") == ended[rank].last("end"), f"rank {rank} ended otherwise"
    assert num_resumed >= enough
    return whole


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _killed(life: Life, dice: random.Random, whole: list[Event]) -> list[Heard]:
    """A life that is killed while it starts or restores, or some events later."""
    num_events = dice.randrange(1 + len(whole) // 3) if dice.random() < 0.8 else -1
    with Ranks(life) as ranks:
        ranks.read_until(lambda: bool(ranks.heard[0].all("begun")))
        if num_events >= 0:
            ranks.read_until(lambda: bool(ranks.heard[0].all("restored")))
            ranks.read_until(lambda: len(ranks.heard[0].all("event")) >= num_events)
        most = 5.3 if num_events >= 0 else 7.0  # up to some updates; all of a restore
        for _ in range(int(10 ** dice.uniform(1.0, most))):
            pass
        ranks.kill()
        return ranks.finish()


def _check(heard: list[Heard], whole: list[list[Event]]) -> int:
    """Hold every rank's life against the whole run; returns the step that it restored."""
    restored = {step for one in heard for step in one.all("restored")}
    assert len(restored) <= 1, f"the ranks restored different steps: {restored}"
    step = min(restored, default=0)
    for rank, one in enumerate(heard):
        expected = _from(whole[rank], step)
        for found, other in zip(one.all("event"), expected, strict=False):
            assert found == other, f"rank {rank}, from step {step}: {found}, never killed: {other}"
        assert len(one.all("event")) <= len(expected)
    return step


def _from(whole: list[Event], step: int) -> list[Event]:
    """What comes after the boundary of ``step``: an update's evaluation comes before."""
    if not step:
        return whole
    begins = (i for i, event in enumerate(whole) if event[:2] == ("batch", step))
    return whole[next(begins, len(whole)) :]
