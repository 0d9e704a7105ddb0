"""Where a stop signal is aimed: an instant of a training that has begun, drawn from dice."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from checkfreq.faults import POINTS, POINTS_OF_ONE_RANK
from tests.stops.program import BATCH_SIZE, BATCHES, PLACES

Kind = Literal["time", "place", "trainer", "worker"]

_OF_TRAINER = ("meeting.", "snapshot.", "socket.", "slot.")

#: Passed only where a later step is set aside, where there is none.
_NEVER = ("commit.supersede",)

#: A place that an epoch passes once, and those that come with every sample.
_ONCE_AN_EPOCH = ("validation", "tail")


@dataclass(frozen=True, slots=True)
class Case:
    """Whom the signal finds: how many ranks, with how many loader workers each."""

    world: int
    workers: int
    to: Literal["process", "group"]

    def __str__(self) -> str:
        return f"{self.world} ranks, {self.workers} workers, to the {self.to}"


@dataclass(frozen=True, slots=True)
class Instant:
    """When the signal is sent, and to which rank where it is sent to one process.

    ``where`` is a place of the loop or a fault point that ``rank`` waits at in its ``hit``-th pass
    until the signal was sent; of kind "time", ``wait_s`` seconds into the training. ``spin`` turns
    of an empty loop come between the end of the wait and the signal, if ``is_late``.
    """

    kind: Kind
    rank: int
    where: str = ""
    hit: int = 1
    wait_s: float = 0.0
    is_late: bool = False
    spin: int = 0
    chk_freq: int | None = 2


def draw(dice: random.Random, case: Case, *, whole_s: float) -> Instant:
    """An instant of a life of ``case``, which takes ``whole_s`` seconds if nobody stops it."""
    kinds: tuple[Kind, ...] = ("time", "place", "trainer", "worker")
    kind = dice.choices(kinds, (3, 3, 2, 3))[0]
    rank = dice.randrange(case.world)
    chk_freq = dice.choice((1, 2, 2, 5, None))
    late = {"is_late": dice.random() < 0.3, "spin": int(10 ** dice.uniform(1.0, 5.0))}
    if kind == "time":
        return Instant(kind, rank, wait_s=dice.uniform(0.0, whole_s), chk_freq=chk_freq)
    if kind == "place":
        where = dice.choice(PLACES)
        return Instant(kind, rank, where, _hit_of(dice, where), chk_freq=chk_freq, **late)
    where = dice.choice(_points(case, of_trainer=kind == "trainer"))
    if kind == "worker":
        chk_freq = 1  # or few are reached
    return Instant(kind, rank, where, dice.randint(1, 4), chk_freq=chk_freq, **late)


def _hit_of(dice: random.Random, where: str) -> int:
    if where == "end":
        return 1
    if where in _ONCE_AN_EPOCH:
        return dice.randint(1, 3)
    batches = dice.randint(2, 2 * BATCHES)
    return batches * BATCH_SIZE if where == "fetch" else batches


def _points(case: Case, *, of_trainer: bool) -> list[str]:
    known = POINTS_OF_ONE_RANK if case.world == 1 else POINTS
    points = [point for point in known if point not in _NEVER]
    return [point for point in points if point.startswith(_OF_TRAINER) == of_trainer]
