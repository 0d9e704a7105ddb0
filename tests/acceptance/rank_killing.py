"""The killer: a training of several ranks is killed at random instants and resumed.

What each life of each rank reports must be a piece of what the same rank reports in a whole run,
without a gap, from the step it restored. At the end every rank has the same bits.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from iterators import Ledger
from tests.acceptance.rank_training import EPOCHS, NUM_SAMPLES, train
from tests.acceptance.ranks import Heard, Life, Ranks, run_well

logger = logging.getLogger(__name__)

#: One event of a rank: what, where in the data, at which step, and the bits.
Event = tuple[str, tuple[int, int], int, Any]

#: Who is killed first; the others are killed once that rank is dead, as a launcher would.
VICTIMS = ("all", "rank 0", "last rank")


def run_killed(folder: Path, *, world: int, seed: int, **settings: Any) -> int:
    """Kill the training once per entry of ``VICTIMS`` and once early, and compare.

    Returns how many lives continued from a checkpoint.
    """
    whole_life = Life(train, _made(folder / "whole"), world, settings=settings)
    whole = [events(heard) for heard in run_well(whole_life)]
    require_exactly_once(whole)
    dice = random.Random(f"{settings}{seed}")
    lives, durable = 0, 0
    for number, victim in enumerate([*dice.sample(VICTIMS, len(VICTIMS)), "nobody"], 1):
        seed = number if durable else 0
        life = Life(train, _made(folder / "killed"), world, number, seed, settings)
        heard = (
            run_well(life) if victim == "nobody" else _killed(life, victim, durable, dice, whole)
        )
        lives += _check_all(heard, whole, at_least=durable)
        durable = max([durable, *(step for one in heard for step in one.all("durable"))])
    for rank in range(world):
        assert heard[rank].last("end") == _end(whole[rank]), f"rank {rank} ended otherwise"
    return lives


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _killed(
    life: Life, victim: str, durable: int, dice: random.Random, whole: list[list[Event]]
) -> list[Heard]:
    """A life killed a while after rank 0 reported some event of those to come."""
    left = [event for event in whole[0] if event[2] >= durable]
    at = left[dice.randrange(len(left) * 2 // 3)]
    rank = 0 if victim == "rank 0" else life.world - 1
    with Ranks(life) as ranks:
        ranks.read_until(lambda: at[:3] in [event[:3] for event in events(ranks.heard[0])])
        for _ in range(int(10 ** dice.uniform(1.0, 5.0))):  # up to some iterations
            pass
        if victim == "all":
            ranks.kill()
            heard = ranks.finish()
        else:
            ranks.kill([rank])
            heard = ranks.end_with(rank)
    logger.info("%s: killed %s after %s: %s", life.number, victim, at[:3], restored_steps(heard))
    return heard


def events(heard: Heard) -> list[Event]:
    """What a rank reported that a whole run reports as well."""
    found: list[Any] = []
    for report in heard.reports:
        if report[0] in ("batch", "loss", "tail"):
            found.append(report)
        elif report[0] == "end":
            found.append(("end", (EPOCHS, 0), 10**9, report[1]))
    return found


def _end(whole: Iterable[Event]) -> Any:
    return next(event for event in whole if event[0] == "end")[3]


def restored_steps(heard: list[Heard]) -> list[int]:
    """The step that each rank restored, if it came so far."""
    return [step for one in heard for step in one.all("restored")]


def _check_all(heard: list[Heard], whole: list[list[Event]], *, at_least: int) -> bool:
    """Hold every rank's life against the whole run; True if it began with a restore."""
    restored = set(restored_steps(heard))
    assert len(restored) <= 1, f"the ranks restored different steps: {restored}"
    start = min(restored, default=0)
    assert not restored or start >= at_least, f"durable was {at_least}, restored is {start}"
    for rank, one in enumerate(heard):
        found = events(one)
        expected = [event for event in whole[rank] if event[2] >= start]
        assert found == expected[: len(found)], _difference(rank, start, found, expected)
    return bool(restored)


def _difference(rank: int, start: int, found: list[Event], expected: list[Event]) -> str:
    for one, other in zip(found, expected, strict=False):
        if one != other:
            return f"rank {rank}, restored step {start}: {one}, uninterrupted: {other}"
    return f"rank {rank}, restored step {start}: {len(found)} events, expected {len(expected)}"


def require_exactly_once(whole: list[list[Event]]) -> None:
    """All ranks together served every sample once in every epoch."""
    for epoch in range(EPOCHS):
        served = [
            sample
            for one in whole
            for kind, key, _, bits in one
            if kind == "batch" and key[0] == epoch
            for sample in bits[0]
        ]
        assert sorted(served) == list(range(NUM_SAMPLES)), f"epoch {epoch}"
        assert Ledger.of(served) == Ledger.of(range(NUM_SAMPLES))
