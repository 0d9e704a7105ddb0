"""Where a stop signal is aimed: an instant of a training that has begun, drawn from dice."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from checkfreq.faults import POINTS, POINTS_OF_A_MIRROR, POINTS_OF_ONE_RANK
from tests.stops.program import BATCH_SIZE, BATCHES, PLACES

Kind = Literal["start", "time", "place", "trainer", "worker", "upload"]

_OF_TRAINER = ("meeting.", "snapshot.", "socket.", "slot.")

#: Passed only by a rank that does not lead, and by that and the leader alike.
_OF_MEMBERS = ("parts.join", "parts.write_manifest", "parts.sync_manifest", "parts.rename")
_OF_ALL = ("worker.receive", "commit.write", "commit.sync_payload", "worker.reply")

#: Passed on the mirror's own thread, and only once there is something to remove.
_RARELY = ("mirror.remove",)

#: Passed only where a later step is set aside, or on the mirror's own thread.
_NEVER = ("commit.supersede", "mirror.")

#: A place that an epoch passes once, and those that come with every sample.
_ONCE_AN_EPOCH = ("validation", "tail")


@dataclass(frozen=True, slots=True)
class Case:
    """Whom the signal finds: how many ranks, with how many loader workers each."""

    world: int
    workers: int
    to: Literal["process", "group", "everything"]  # the last: as a scheduler that knows them all

    def __str__(self) -> str:
        return f"{self.world} ranks, {self.workers} workers, to the {self.to}"


@dataclass(frozen=True, slots=True)
class Instant:
    """When the signal is sent, and to which rank where it is sent to one process.

    ``where`` is a place of the loop or a fault point that ``rank`` waits at in its ``hit``-th pass
    until the signal was sent; of kind "time", ``wait_s`` seconds into the training, and of kind
    "start", into the restore and the first iteration. ``spin`` turns
    of an empty loop come between the end of the wait and the signal, if ``is_late``. The signal is
    sent once more after ``again_s`` seconds.
    """

    kind: Kind
    rank: int
    where: str = ""
    hit: int = 1
    wait_s: float = 0.0
    is_late: bool = False
    spin: int = 0
    chk_freq: int | None = 2
    again_s: float | None = None

    on_stop: Literal["raise", "return"] = "raise"


def draw(dice: random.Random, case: Case, *, whole_s: float, mirrors: bool) -> Instant:
    """An instant of a life of ``case``, which takes ``whole_s`` seconds if nobody stops it."""
    kinds: tuple[Kind, ...] = ("time", "place", "trainer", "worker", "start", "upload")
    # A rank of many that dies at its start is no stop, but a failed start.
    weights = (3, 3, 2, 3, 1 if case.world == 1 else 0, 5 if mirrors else 0)
    kind = dice.choices(kinds, weights)[0]
    rank = 0 if kind == "upload" else dice.randrange(case.world)
    chk_freq = dice.choice((1, 2, 2, 5, None))
    instant = Instant(
        kind,
        rank,
        chk_freq=1 if kind in ("worker", "upload") else chk_freq,  # or few are reached
        again_s=dice.uniform(0.0, 0.5) if dice.random() < 0.3 else None,
        on_stop=dice.choice(("raise", "return")),
    )
    if kind in ("start", "time"):
        most_s = whole_s if kind == "time" else 0.1
        return replace(instant, wait_s=dice.uniform(0.0, most_s))
    where = dice.choice(PLACES if kind == "place" else _points(case, rank, kind))
    most = 2 if kind == "upload" else 4  # one upload may be all that comes before the validation
    hit = _hit_of(dice, where) if kind == "place" else dice.randint(1, most)
    is_late, spin = dice.random() < 0.3, int(10 ** dice.uniform(1.0, 5.0))
    return replace(instant, where=where, hit=hit, is_late=is_late, spin=spin)


def _hit_of(dice: random.Random, where: str) -> int:
    if where == "end":
        return 1
    if where in _ONCE_AN_EPOCH:
        return dice.randint(1, 3)
    batches = dice.randint(2, 2 * BATCHES)
    return batches * BATCH_SIZE if where == "fetch" else batches


def _points(case: Case, rank: int, kind: Kind) -> list[str]:
    """The fault points that a rank's trainer or worker passes; rank 0 leads."""
    if kind == "upload":
        return [point for point in POINTS_OF_A_MIRROR if not point.startswith(_RARELY)]
    if kind == "trainer":
        known = POINTS_OF_ONE_RANK if case.world == 1 else POINTS
        return [point for point in known if point.startswith(_OF_TRAINER)]
    others = [point for point in POINTS if not point.startswith(_OF_TRAINER)]
    others = [point for point in others if not point.startswith(_NEVER)]
    if case.world == 1:
        return [point for point in others if point in POINTS_OF_ONE_RANK]
    if rank == 0:
        return [point for point in others if point not in _OF_MEMBERS]
    return [point for point in others if point in (*_OF_MEMBERS, *_OF_ALL)]
