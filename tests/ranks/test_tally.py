"""Votes joined in any grouping give the decision that rank 0 would make from each of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from checkfreq.policy.ending import Needs
from checkfreq.ranks.coordinator import Decision, Proposal
from checkfreq.ranks.rank_sets import listed
from checkfreq.ranks.tally import Tally, Vote, decide, joined, tally_json, tally_of
from checkfreq.ranks.tree import Tree
from checkfreq.run.notices import Stop
from checkfreq.types import SnapshotPlace

SECONDS = st.sampled_from([0.0, 0.5, 1.0, 2.5, 30.0, 500.0])
NUMBERS = SECONDS | st.just(math.nan)
STOPS = st.builds(Stop, st.sampled_from("ab"), st.just("why"), st.none() | SECONDS)
DURABLE = st.lists(st.tuples(st.sampled_from([10, 20, 30]), st.sampled_from("xy")), max_size=3)
PROPOSALS = st.builds(
    Proposal,
    st.sampled_from(["", "periodic"]),
    st.booleans(),
    st.sampled_from(["", "late"]),
    st.none() | st.sampled_from(SnapshotPlace),
)
VOTES = st.builds(
    Vote,
    PROPOSALS,
    is_ready=st.booleans(),
    is_written=st.booleans(),
    is_restructured=st.booleans(),
    stop=st.none() | STOPS,
    end=st.none() | STOPS.filter(lambda stop: stop.ends_in_s is not None),
    needs=st.builds(Needs, SECONDS, SECONDS),
    step=st.just(7),
    durable=st.none() | DURABLE,
    costs=st.dictionaries(st.sampled_from(["cost_s", "persist_s"]), SECONDS),
    next_step=st.integers(8, 90),
    held_back=st.sampled_from(["", "2 failed in a row"]),
    keep=st.booleans(),
    metrics=st.dictionaries(st.sampled_from(["loss", "rate"]), NUMBERS),
)


def flat(votes: Sequence[Vote]) -> Decision:
    """The decision from a list of all votes: what the joined ones must come to."""
    first = votes[0]
    proposal, ranks = first.proposal, range(len(votes))
    unready = tuple(rank for rank in ranks if not votes[rank].is_ready)
    held_back = [f"{votes[r].held_back} (rank {r})" for r in ranks if votes[r].held_back]
    is_written = all(vote.is_written for vote in votes)
    takes = bool(proposal.reason) and not is_written
    defers = proposal.why_late
    if takes and not proposal.must and not defers and (held_back or unready):
        text = f"no slot is free, or slots are being prepared, on rank {listed(unready)}"
        defers = held_back[0] if held_back else text
    needs = Needs(
        max(vote.needs.durable_s for vote in votes), max(vote.needs.gap_s for vote in votes)
    )
    ends = [named(rank, vote.end) for rank, vote in enumerate(votes) if vote.end is not None]
    end = min(ends, key=left_s, default=None)
    stops = [named(rank, vote.stop) for rank, vote in enumerate(votes) if vote.stop is not None]
    if end is not None:
        stops = [replace(s, ends_in_s=min(s, end, key=left_s).ends_in_s) for s in stops]
        if needs.must_start(left_s(end)):
            stops.append(end)
    soon = [] if end is None else [first.step + needs.boundaries_to_look(left_s(end))]
    return Decision(
        reason=proposal.reason,
        must=proposal.must,
        attempt="a1" if takes and not defers else "",
        place=proposal.place,
        waits_for=unready if takes and proposal.must else (),
        defer=defers,
        is_written=is_written,
        stop=stops[0] if stops else None,
        confirmed_step=confirmed(votes),
        costs=highest(votes),
        next_step=min([first.next_step, *soon]),
        compares=any(vote.is_restructured for vote in votes),
        is_held_back=bool(held_back),
        keep=first.keep,
        metrics=first.metrics,
        unequal=unequal(votes),
    )


def named(rank: int, stop: Stop) -> Stop:
    return replace(stop, source=f"{stop.source} (rank {rank})", why=f"{stop.why} (rank {rank})")


def left_s(stop: Stop) -> float:
    return math.inf if stop.ends_in_s is None else stop.ends_in_s


def confirmed(votes: Sequence[Vote]) -> int | None:
    held = [set(vote.durable) for vote in votes if vote.durable is not None]
    common = set.intersection(*held) if held else set()
    return max((step for step, _ in common), default=None)


def highest(votes: Sequence[Vote]) -> dict[str, float]:
    names = sorted({name for vote in votes for name in vote.costs})
    return {n: max(vote.costs[n] for vote in votes if n in vote.costs) for n in names}


def unequal(votes: Sequence[Vote]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in sorted({name for vote in votes for name in vote.metrics}):
        given = [(rank, v.metrics[name]) for rank, v in enumerate(votes) if name in v.metrics]
        once = [
            (rank, value)
            for rank, value in given
            if all(repr(value) != repr(other) for r, other in given if r < rank)
        ]
        first = votes[0].metrics.get(name)
        if any(repr(value) != repr(first) for _, value in once):
            found[name] = once if name in votes[0].metrics else [(0, None), *once]
    return found


def through_json(tally: Tally) -> Tally:
    return tally_of(json.loads(json.dumps(tally_json(tally))))


def comparable(decision: Decision) -> Any:
    return json.dumps(
        {name: getattr(decision, name) for name in decision.__dataclass_fields__},
        default=repr,  # NaN is not equal to itself, but its text is
        sort_keys=True,
    )


@settings(max_examples=40)
@given(st.lists(VOTES, min_size=1, max_size=16), st.integers(1, 4))
def test_the_decision_is_that_from_a_list_of_all_votes(votes: list[Vote], fan_in: int) -> None:
    tree = Tree(len(votes), fan_in=fan_in)

    def tally(rank: int) -> Tally:
        own = through_json(Tally.of(rank, votes[rank]))
        return through_json(joined([own, *(tally(head) for head in tree.node(rank).heads)]))

    assert comparable(decide(tally(0), attempt="a1")) == comparable(flat(votes))


def test_a_tally_of_a_thousand_ranks_is_about_as_long_as_a_vote() -> None:
    own = Vote(
        Proposal(), is_ready=False, is_written=False, metrics={"loss": 1.0}, costs={"a": 2.0}
    )
    one = json.dumps(tally_json(Tally.of(0, own)))
    differing = [
        Tally.of(rank, replace(own, metrics={"loss": float(rank)})) for rank in range(1000)
    ]
    assert len(json.dumps(tally_json(joined(differing)))) < 2 * len(one)
