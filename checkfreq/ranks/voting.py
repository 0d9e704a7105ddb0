"""How ranks vote: at a boundary every rank casts a `Vote`, and one `Decision` holds for all.

Rank 0 proposes when a checkpoint is due, from its clock and the highest costs of any rank. Every
rank says whether it can take one, what failed, and whether it was told to stop (``tally``). Each
meeting also settles when the next one is, so that boundaries in between cost nothing.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from checkfreq.errors import StateError
from checkfreq.ranks import tally
from checkfreq.ranks.coordinator import Decision
from checkfreq.ranks.meetings import Meetings
from checkfreq.ranks.merging import Merge, distinct, first_says, grouped
from checkfreq.ranks.rank_sets import RankSet, members, names_of
from checkfreq.ranks.tally import Durable, Tally, Vote
from checkfreq.types import Json

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Settled:
    """How a checkpoint ended: ``failed`` says on which ranks it failed and why ("" if on none)."""

    failed: str
    confirmed_step: int | None


class Structured(Protocol):
    """What knows the structure of the state: `run.replicas`."""

    def structure_digest(self) -> str:
        """Equal on ranks of equal structure."""
        ...

    def structure_listing(self) -> dict[str, str]:
        """The structure in words, by name."""
        ...


class Voting:
    """The boundaries at which the ranks vote, and what they decide."""

    def __init__(self, meetings: Meetings) -> None:
        self.meetings = meetings
        self._next_step = 0

    def meets_at(self, step: int) -> bool:
        """Whether the ranks agreed to meet at this boundary."""
        return step >= self._next_step

    def agree(self, phase: str, say: Callable[[], Vote], *, state: Structured) -> Decision:
        """Vote: ``say()`` makes this rank's vote; if it raises, the meeting fails on all ranks.

        Raises StateError on every rank, with the names, if their structures of state differ.
        """

        reply = self.meetings.act(phase, say, merge=VOTES)
        decision = _decision(reply)
        if decision.compares:
            self._compare(state)
        self._next_step = decision.next_step
        return decision

    def settle(self, phase: str, error: str | None, *, durable: Durable | None) -> Settled:
        """Meet after a wait; ``error`` says why this rank's part failed, None if it did not."""
        said = {"error": error, "durable": durable}
        reply = self.meetings.meet(phase, said, merge=_ENDINGS)
        return Settled(reply["failed"], reply["confirmed_step"])

    def _compare(self, state: Structured) -> None:
        phase = "comparing the structure of the state"
        same = distinct(lambda digests: len(digests) == 1, most=2)
        if self.meetings.act(phase, state.structure_digest, merge=same):
            return
        own: dict[str, str] = {}

        def listing() -> dict[str, str]:
            own.update(state.structure_listing())
            return own

        first = self.meetings.act(phase, listing, merge=first_says)
        texts = self.meetings.act(phase, lambda: difference(own, first), merge=grouped())
        raise StateError(differences(texts))


def _joined_votes(said: Sequence[Json]) -> Json:
    return tally.tally_json(tally.joined([tally.tally_of(word) for word in said]))


def _decided(word: Json) -> Json:
    return _decision_json(tally.decide(tally.tally_of(word), attempt=uuid.uuid4().hex))


#: How votes become a decision.
VOTES = Merge(lambda rank, vote: tally.tally_json(Tally.of(rank, vote)), _joined_votes, _decided)


def _ending(rank: int, said: Json) -> Json:
    failed = [[rank, said["error"]]] if said["error"] else []
    return {"failed": failed, "durable": said["durable"]}


def _joined_endings(said: Sequence[Json]) -> Json:
    failed = [pair for word in said for pair in word["failed"]]
    return {"failed": failed, "durable": tally.in_all([word["durable"] for word in said])}


def _settled(word: Json) -> Json:
    failed = "; ".join(f"rank {rank}: {error}" for rank, error in word["failed"])
    return {"failed": failed, "confirmed_step": tally.newest(word["durable"])}


_ENDINGS = Merge(_ending, _joined_endings, _settled)


def _decision_json(decision: Decision) -> Json:
    place = decision.place
    return {**dataclasses.asdict(decision), "place": None if place is None else place.value}


def _decision(said: Json) -> Decision:
    parts = {"waits_for": tuple(said["waits_for"]), "stop": tally.stop_of(said["stop"])}
    return Decision(**{**tally.with_place(said), **parts})


def difference(own: Mapping[str, str], first: Mapping[str, str]) -> str:
    """How a rank's structure of state differs from rank 0's: which names, and how; "" if not."""
    names = sorted(n for n in {*first, *own} if first.get(n) != own.get(n))
    shown = [
        f"{name} is {own.get(name, 'not there')}, on rank 0 {first.get(name, 'not there')}"
        for name in names[:_SHOWN]
    ]
    more = [f"and {len(names) - _SHOWN} more"] * (len(names) > _SHOWN)
    return "; ".join([*shown, *more])


def differences(found: Sequence[tuple[str, RankSet]]) -> str:
    """The error text for ranks whose state differs from rank 0's."""
    texts = [f"{names_of(members(ranks))}: {text}" for text, ranks in found if text]
    return (
        "the ranks hold different state, expected the same structure on all: "
        f"{' | '.join(texts) or 'their classes of state differ'}. Build the same model and "
        "optimizer on every rank, or name what differs in CFCheckpoint(per_rank=...)"
    )
