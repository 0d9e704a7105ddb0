"""How ranks vote: at a boundary every rank casts a `Vote`, and one `Decision` holds for all.

Rank 0 proposes when a checkpoint is due, from its clock and the highest costs of any rank. Every
rank says whether it can take one, what failed, and whether it was told to stop. Each meeting also
settles when the next one is, so that boundaries in between cost nothing. Pure, but for the
meetings.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Protocol

from checkfreq.errors import StateError
from checkfreq.policy.ending import NO_NEEDS, Needs
from checkfreq.ranks.coordinator import Decision, Proposal
from checkfreq.ranks.meetings import Meetings
from checkfreq.run.notices import Stop
from checkfreq.types import Json, SnapshotPlace

_SHOWN = 5

#: (step, attempt) of checkpoints.
Durable = Sequence[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Vote:
    """What a rank says at a boundary.

    ``is_ready``: it could take a snapshot now. ``is_written``: it has this step written, or on its
    way. ``is_restructured``: the structure of its state changed since ranks last compared theirs.
    ``stop``: the signal it received. ``end``: the earliest end of the run that it knows of, however
    far off; ``needs``: what its last checkpoint needs before that. ``step``: the boundary.
    ``durable``: the newest steps, and their attempts, in the directory that it leads; None from
    ranks that lead none. ``costs``: its measured seconds, by the names in
    ``profile.SHARED_COSTS``. ``next_step``: the boundary at which rank 0 proposes to meet again.
    ``held_back``: why it wants no periodic checkpoint now (its storage fails). ``keep`` and
    ``metrics`` were passed to ``save``.
    """

    proposal: Proposal
    is_ready: bool
    is_written: bool
    is_restructured: bool = False
    stop: Stop | None = None
    end: Stop | None = None
    needs: Needs = NO_NEEDS
    step: int = 0
    durable: Durable | None = None
    costs: Mapping[str, float] = field(default_factory=dict)
    next_step: int = 0
    held_back: str = ""
    keep: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


def decide(votes: Sequence[Vote], *, attempt: str) -> Decision:
    """The decision that follows from the votes, rank 0's first."""
    proposal = votes[0].proposal
    is_written = all(vote.is_written for vote in votes)
    unready = tuple(rank for rank, vote in enumerate(votes) if not vote.is_ready)
    takes = bool(proposal.reason) and not is_written
    held_back = [f"{vote.held_back} (rank {r})" for r, vote in enumerate(votes) if vote.held_back]
    defers = proposal.why_late
    if takes and not proposal.must and not defers:
        defers = held_back[0] if held_back else _why_unready(unready) if unready else ""
    end, needs = _earliest(votes), reduce(Needs.with_, (vote.needs for vote in votes))
    return Decision(
        reason=proposal.reason,
        must=proposal.must,
        attempt=attempt if takes and not defers else "",
        place=proposal.place,
        waits_for=unready if takes and proposal.must else (),
        defer=defers,
        is_written=is_written,
        stop=_stop(votes, end, needs),
        confirmed_step=confirmed([vote.durable for vote in votes]),
        costs=_highest([vote.costs for vote in votes]),
        next_step=_next_step(votes[0], end, needs),
        compares=any(vote.is_restructured for vote in votes),
        is_held_back=bool(held_back),
        keep=votes[0].keep,
        metrics=votes[0].metrics,
        unequal=_unequal([vote.metrics for vote in votes]),
    )


def _earliest(votes: Sequence[Vote]) -> Stop | None:
    """The earliest end that any rank knows of; None if none knows one."""
    ends = [_of_rank(rank, vote.end) for rank, vote in enumerate(votes) if vote.end is not None]
    return min(ends, key=_left_s, default=None)


def _stop(votes: Sequence[Vote], end: Stop | None, needs: Needs) -> Stop | None:
    """Why all ranks stop here: a signal that one received, or an end that comes too soon."""
    for rank, vote in enumerate(votes):
        if vote.stop is not None:
            return _of_rank(rank, vote.stop)
    return end if end is not None and needs.must_start(_left_s(end)) else None


def _next_step(first: Vote, end: Stop | None, needs: Needs) -> int:
    """The next meeting: as rank 0 proposes, but in time for the end."""
    if end is None:
        return first.next_step
    return min(first.next_step, first.step + needs.boundaries_to_look(_left_s(end)))


def _left_s(stop: Stop) -> float:
    return math.inf if stop.ends_in_s is None else stop.ends_in_s


def _of_rank(rank: int, stop: Stop) -> Stop:
    name = f" (rank {rank})"
    return replace(stop, source=stop.source + name, why=stop.why + name)


def _unequal(metrics: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """Metrics on which a rank differs from rank 0: by name, the values of all ranks.

    A rank that does not pass a metric agrees with rank 0, which may be the only one to know it.
    """
    found = {}
    for name in sorted({name for given in metrics for name in given}):
        values = [given.get(name) for given in metrics]
        if any(v is not None and repr(v) != repr(values[0]) for v in values):
            found[name] = values
    return found


def _why_unready(ranks: Sequence[int]) -> str:
    return f"no slot is free, or slots are being prepared, on rank {', '.join(map(str, ranks))}"


def confirmed(durable: Sequence[Durable | None]) -> int | None:
    """The newest step of which every directory holds the same attempt; None if there is none."""
    held = [{(step, attempt) for step, attempt in found} for found in durable if found is not None]
    common = set.intersection(*held) if held else set()
    return max((step for step, _ in common), default=None)


def _settle(said: Sequence[Json]) -> Json:
    failed = [f"rank {rank}: {vote['error']}" for rank, vote in enumerate(said) if vote["error"]]
    step = confirmed([vote["durable"] for vote in said])
    return {"failed": "; ".join(failed), "confirmed_step": step}


def _highest(costs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for known in costs for name in known}
    return {name: max(known[name] for known in costs if name in known) for name in sorted(names)}


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

        def decide_votes(votes: Sequence[Json]) -> Json:
            decision = decide([_vote(vote) for vote in votes], attempt=uuid.uuid4().hex)
            return _decision_json(decision)

        reply = self.meetings.act(phase, lambda: _vote_json(say()), decide=decide_votes)
        decision = _decision(reply)
        if decision.compares:
            self._compare(state)
        self._next_step = decision.next_step
        return decision

    def settle(self, phase: str, error: str | None, *, durable: Durable | None) -> Settled:
        """Meet after a wait; ``error`` says why this rank's part failed, None if it did not."""
        said = {"error": error, "durable": durable}
        reply = self.meetings.meet(phase, said, decide=_settle)
        return Settled(reply["failed"], reply["confirmed_step"])

    def _compare(self, state: Structured) -> None:
        phase = "comparing the structure of the state"
        is_same = self.meetings.act(phase, state.structure_digest, decide=_are_equal)
        if not is_same:
            listings = self.meetings.act(phase, state.structure_listing)
            raise StateError(difference(listings))


def _are_equal(digests: Sequence[Json]) -> bool:
    return len(set(digests)) == 1


def _vote_json(vote: Vote) -> Json:
    said = dataclasses.asdict(vote)
    return {**said, "proposal": _with_place_name(said["proposal"])}


def _vote(said: Json) -> Vote:
    parts = {
        "proposal": Proposal(**_with_place(said["proposal"])),
        "stop": _stop_of(said["stop"]),
        "end": _stop_of(said["end"]),
        "needs": Needs(**said["needs"]),
    }
    return Vote(**{**said, **parts})


def _decision_json(decision: Decision) -> Json:
    return _with_place_name(dataclasses.asdict(decision))


def _decision(said: Json) -> Decision:
    parts = {"waits_for": tuple(said["waits_for"]), "stop": _stop_of(said["stop"])}
    return Decision(**{**_with_place(said), **parts})


def _stop_of(said: Json) -> Stop | None:
    return None if said is None else Stop(**said)


def _with_place_name(fields: Mapping[str, Json]) -> dict[str, Json]:
    place = fields["place"]
    return {**fields, "place": None if place is None else place.value}


def _with_place(fields: Mapping[str, Json]) -> dict[str, Json]:
    name = fields["place"]
    return {**fields, "place": None if name is None else SnapshotPlace(name)}


def difference(listings: Sequence[Mapping[str, str]]) -> str:
    """The error text for ranks whose state differs from rank 0's: which names, and how."""
    first, texts = listings[0], []
    for rank, listing in enumerate(listings[1:], 1):
        names = sorted(n for n in {*first, *listing} if first.get(n) != listing.get(n))
        shown = [
            f"{name} is {listing.get(name, 'not there')}, on rank 0 {first.get(name, 'not there')}"
            for name in names[:_SHOWN]
        ]
        more = [f"and {len(names) - _SHOWN} more"] * (len(names) > _SHOWN)
        if names:
            texts.append(f"rank {rank}: {'; '.join([*shown, *more])}")
    return (
        "the ranks hold different state, expected the same structure on all: "
        f"{' | '.join(texts) or 'their classes of state differ'}. Build the same model and "
        "optimizer on every rank, or name what differs in CFCheckpoint(per_rank=...)"
    )
