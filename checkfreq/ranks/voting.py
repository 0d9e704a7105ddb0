"""What the ranks of a run agree on at a boundary: one decision, at one step, for all of them.

Rank 0's costs, raised to the highest of any rank, and its clock decide when a checkpoint is due;
every rank says whether it could take one, what failed, and whether it was told to stop. The next
meeting is agreed at each, so that boundaries without one cost nothing. Pure, but for the meetings.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from checkfreq.errors import StateError
from checkfreq.ranks.coordinator import Decision, Proposal
from checkfreq.ranks.meetings import Meetings
from checkfreq.types import Json, SnapshotPlace

_SHOWN = 5

#: (step, attempt) of checkpoints.
Durable = Sequence[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Vote:
    """What a rank says at a boundary. ``costs`` are the seconds of ``Profile.RAISED`` it knows.

    ``is_restructured``: its state has another structure than when it was last compared.
    ``durable`` are the newest steps, and their attempts, in the directory that it leads; None
    from the others.
    ``held_back`` says why it wants no periodic checkpoint now, where storage fails for it.
    ``next_step`` is when rank 0 proposes to meet again. ``keep`` and ``metrics`` were given to
    ``save``.
    """

    proposal: Proposal
    is_ready: bool
    is_written: bool
    is_restructured: bool = False
    stop: str | None = None
    durable: Durable | None = None
    costs: Mapping[str, float] = field(default_factory=dict)
    next_step: int = 0
    held_back: str = ""
    keep: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


def decide(words: Sequence[Vote], *, attempt: str) -> Decision:
    """The decision that follows from what the ranks said, rank 0 first."""
    proposal = words[0].proposal
    is_written = all(word.is_written for word in words)
    unready = tuple(rank for rank, word in enumerate(words) if not word.is_ready)
    takes = bool(proposal.reason) and not is_written
    held_back = [f"{word.held_back} (rank {r})" for r, word in enumerate(words) if word.held_back]
    defers = proposal.why_late
    if takes and not proposal.must and not defers:
        defers = held_back[0] if held_back else _why_unready(unready) if unready else ""
    stops = [f"{word.stop} (rank {rank})" for rank, word in enumerate(words) if word.stop]
    return Decision(
        reason=proposal.reason,
        must=proposal.must,
        attempt=attempt if takes and not defers else "",
        place=proposal.place,
        waits_for=unready if takes and proposal.must else (),
        defer=defers,
        is_written=is_written,
        stop=stops[0] if stops else None,
        confirmed_step=confirmed([word.durable for word in words]),
        costs=_highest([word.costs for word in words]),
        next_step=words[0].next_step,
        compares=any(word.is_restructured for word in words),
        is_held_back=bool(held_back),
        keep=words[0].keep,
        metrics=words[0].metrics,
        unequal=_unequal([word.metrics for word in words]),
    )


def _unequal(metrics: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """By name, the values on all ranks, where one gives another than rank 0 does.

    A rank that gives none at all agrees: only rank 0 may know it.
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
    """The newest step of which every directory holds the same attempt."""
    held = [{(step, attempt) for step, attempt in found} for found in durable if found is not None]
    common = set.intersection(*held) if held else set()
    return max((step for step, _ in common), default=None)


def _settle(said: Sequence[Json]) -> Json:
    failed = [f"rank {rank}: {word['error']}" for rank, word in enumerate(said) if word["error"]]
    step = confirmed([word["durable"] for word in said])
    return {"failed": "; ".join(failed), "confirmed_step": step}


def _highest(costs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for known in costs for name in known}
    return {name: max(known[name] for known in costs if name in known) for name in sorted(names)}


@dataclass(frozen=True, slots=True)
class Settled:
    """How a checkpoint ended: ``failed`` says which ranks failed and why, "" if none did."""

    failed: str
    confirmed_step: int | None


class Structured(Protocol):
    """Who knows the structure of the state: the pipeline."""

    def structure_digest(self) -> str:
        """Equal on ranks of equal structure."""
        ...

    def structure_listing(self) -> dict[str, str]:
        """The structure in words, by name."""
        ...


class Collective:
    """The boundaries at which the ranks meet, and what they decide there."""

    def __init__(self, meetings: Meetings) -> None:
        self.meetings = meetings
        self._next_step = 0

    def meets_at(self, step: int) -> bool:
        """Whether a meeting was agreed for this boundary."""
        return step >= self._next_step

    def agree(self, phase: str, say: Callable[[], Vote], *, state: Structured) -> Decision:
        """Meet: ``say()`` makes this rank's Vote, or raises for all of them.

        Raises StateError on every rank, with the names, if their structures of state differ.
        """

        def decide_words(words: Sequence[Json]) -> Json:
            decision = decide([_vote(word) for word in words], attempt=uuid.uuid4().hex)
            return _decision_json(decision)

        reply = self.meetings.act(phase, lambda: _vote_json(say()), decide=decide_words)
        decision = _decision(reply)
        if decision.compares:
            self._compare(state)
        self._next_step = decision.next_step
        return decision

    def settle(self, phase: str, error: str | None, *, durable: Durable | None) -> Settled:
        """Meet after a wait: ``error`` is why this rank's part failed, if it did."""
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
    words = dataclasses.asdict(vote)
    return {**words, "proposal": _with_place_name(words["proposal"])}


def _vote(words: Json) -> Vote:
    return Vote(**{**words, "proposal": Proposal(**_with_place(words["proposal"]))})


def _decision_json(decision: Decision) -> Json:
    return _with_place_name(dataclasses.asdict(decision))


def _decision(words: Json) -> Decision:
    return Decision(**{**_with_place(words), "waits_for": tuple(words["waits_for"])})


def _with_place_name(fields: Mapping[str, Json]) -> dict[str, Json]:
    place = fields["place"]
    return {**fields, "place": None if place is None else place.value}


def _with_place(fields: Mapping[str, Json]) -> dict[str, Json]:
    name = fields["place"]
    return {**fields, "place": None if name is None else SnapshotPlace(name)}


def difference(listings: Sequence[Mapping[str, str]]) -> str:
    """A sentence that says on which ranks which names differ from rank 0's, and how."""
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
