"""What ranks say at a boundary, how it adds up, and the decision that follows. Pure.

Every rank casts a `Vote`. Votes are joined in the order of the ranks, in any grouping, to a `Tally`
that is about as long as one vote however many ranks it is of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce

from checkfreq.policy.ending import NO_NEEDS, Needs
from checkfreq.ranks import rank_sets
from checkfreq.ranks.coordinator import Decision, Proposal
from checkfreq.ranks.merging import first_of
from checkfreq.ranks.rank_sets import RankSet
from checkfreq.run.notices import Stop
from checkfreq.types import Json, SnapshotPlace

#: (step, attempt) of checkpoints.
Durable = Sequence[tuple[int, str]]
#: Values of a metric, each once, with the first rank that gave it.
Values = Sequence[tuple[int, float | None]]

#: No more values of one metric are told.
_MOST_VALUES = 8


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


@dataclass(frozen=True, slots=True)
class Tally:
    """The votes of successive ranks.

    Of the first of them: ``proposal``, ``step``, ``next_step``, ``keep`` and ``metrics``. Of all:
    ``unready``, who could take no snapshot; ``stop`` and ``held_back``, the first rank's that has
    one, with its name; ``end``, the earliest; ``needs`` and ``costs``, the highest; ``durable``,
    what all directories hold; ``values``, every metric's different values.
    """

    proposal: Proposal
    step: int
    next_step: int
    keep: bool
    metrics: Mapping[str, float]
    is_written: bool
    is_restructured: bool
    unready: RankSet
    stop: Stop | None
    end: Stop | None
    needs: Needs
    durable: Durable | None
    costs: Mapping[str, float]
    held_back: str
    values: Mapping[str, Values]

    @classmethod
    def of(cls, rank: int, vote: Vote) -> Tally:
        """One rank's vote."""
        return cls(
            vote.proposal,
            vote.step,
            vote.next_step,
            vote.keep,
            vote.metrics,
            vote.is_written,
            vote.is_restructured,
            rank_sets.NONE if vote.is_ready else rank_sets.of_ranks([rank]),
            None if vote.stop is None else _of_rank(rank, vote.stop),
            None if vote.end is None else _of_rank(rank, vote.end),
            vote.needs,
            vote.durable,
            vote.costs,
            vote.held_back and f"{vote.held_back} (rank {rank})",
            {name: [(rank, value)] for name, value in vote.metrics.items()},
        )


def joined(tallies: Sequence[Tally]) -> Tally:
    """The votes of all these ranks, in their order."""
    return replace(
        tallies[0],
        is_written=all(tally.is_written for tally in tallies),
        is_restructured=any(tally.is_restructured for tally in tallies),
        unready=rank_sets.united(run for tally in tallies for run in tally.unready),
        stop=next((tally.stop for tally in tallies if tally.stop is not None), None),
        end=min((t.end for t in tallies if t.end is not None), key=_left_s, default=None),
        needs=reduce(Needs.with_, (tally.needs for tally in tallies)),
        durable=in_all([tally.durable for tally in tallies]),
        costs=_highest([tally.costs for tally in tallies]),
        held_back=next((tally.held_back for tally in tallies if tally.held_back), ""),
        values=_values([tally.values for tally in tallies]),
    )


def decide(tally: Tally, *, attempt: str) -> Decision:
    """The decision that follows from the votes of all ranks."""
    proposal = tally.proposal
    unready = tuple(rank_sets.members(tally.unready))
    takes = bool(proposal.reason) and not tally.is_written
    defers = proposal.why_late
    if takes and not proposal.must and not defers:
        defers = tally.held_back or (_why_unready(unready) if unready else "")
    return Decision(
        reason=proposal.reason,
        must=proposal.must,
        attempt=attempt if takes and not defers else "",
        place=proposal.place,
        waits_for=unready if takes and proposal.must else (),
        defer=defers,
        is_written=tally.is_written,
        stop=_stop(tally),
        confirmed_step=newest(tally.durable),
        costs=tally.costs,
        next_step=_next_step(tally),
        compares=tally.is_restructured,
        is_held_back=bool(tally.held_back),
        keep=tally.keep,
        metrics=tally.metrics,
        unequal=_unequal(tally.values),
    )


def _stop(tally: Tally) -> Stop | None:
    """Why all ranks stop here: a signal that one received, or an end that comes too soon."""
    stop, end = tally.stop, tally.end
    if stop is not None:
        soonest = stop if end is None else min(stop, end, key=_left_s)
        return replace(stop, ends_in_s=soonest.ends_in_s)
    return end if end is not None and tally.needs.must_start(_left_s(end)) else None


def _next_step(tally: Tally) -> int:
    """The next meeting: as rank 0 proposes, but in time for the end."""
    if tally.end is None:
        return tally.next_step
    left_s = _left_s(tally.end)
    return min(tally.next_step, tally.step + tally.needs.boundaries_to_look(left_s))


def _left_s(stop: Stop) -> float:
    return math.inf if stop.ends_in_s is None else stop.ends_in_s


def _of_rank(rank: int, stop: Stop) -> Stop:
    name = f" (rank {rank})"
    return replace(stop, source=stop.source + name, why=stop.why + name)


def _values(found: Sequence[Mapping[str, Values]]) -> dict[str, Values]:
    names = sorted({name for values in found for name in values})
    return {n: first_of([v[n] for v in found if n in v], _MOST_VALUES) for n in names}


def _unequal(values: Mapping[str, Values]) -> dict[str, Values]:
    """Metrics on which a rank differs from rank 0, with rank 0's value in front (or None).

    A rank that does not pass a metric agrees with rank 0, which may be the only one to know it.
    """
    found: dict[str, Values] = {}
    for name, given in values.items():
        if given[0][0] != 0:
            found[name] = [(0, None), *given]
        elif len(given) > 1:
            found[name] = given
    return found


def _why_unready(ranks: Sequence[int]) -> str:
    return f"no slot is free, or slots are being prepared, on rank {rank_sets.listed(ranks)}"


# ---- directories


def in_all(durable: Sequence[Durable | None]) -> list[tuple[int, str]] | None:
    """The checkpoints that all directories hold; None if none of these ranks leads in one."""
    held = [{(step, attempt) for step, attempt in found} for found in durable if found is not None]
    return sorted(set.intersection(*held)) if held else None


def newest(durable: Durable | None) -> int | None:
    """The newest step of those that all directories hold."""
    return max((step for step, _ in durable or ()), default=None)


def _highest(costs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for known in costs for name in known}
    return {name: max(known[name] for known in costs if name in known) for name in sorted(names)}


# ---- as JSON


def tally_json(tally: Tally) -> Json:
    """A tally as ``tally_of`` takes it."""
    place = tally.proposal.place
    return {
        **{name: getattr(tally, name) for name in _FIELDS},
        "proposal": {**asdict(tally.proposal), "place": None if place is None else place.value},
        "stop": None if tally.stop is None else asdict(tally.stop),
        "end": None if tally.end is None else asdict(tally.end),
        "needs": asdict(tally.needs),
    }


def tally_of(said: Json) -> Tally:
    """The tally of ``tally_json``."""
    return Tally(
        **{
            **said,
            "proposal": Proposal(**with_place(said["proposal"])),
            "stop": stop_of(said["stop"]),
            "end": stop_of(said["end"]),
            "needs": Needs(**said["needs"]),
        }
    )


_FIELDS = tuple(Tally.__dataclass_fields__)


def stop_of(said: Json) -> Stop | None:
    """A stop as JSON has it."""
    return None if said is None else Stop(**said)


def with_place(fields: Mapping[str, Json]) -> dict[str, Json]:
    """These fields with the place by its name."""
    name = fields["place"]
    return {**fields, "place": None if name is None else SnapshotPlace(name)}
