"""Votes joined in any grouping give the decision that rank 0 would make from each of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkfreq.policy.ending import Needs
from checkfreq.ranks.coordinator import Decision, Proposal
from checkfreq.ranks.merging import Merge
from checkfreq.ranks.tally import Tally, Vote, decide, joined, tally_json, tally_of
from checkfreq.ranks.tree import Tree
from checkfreq.ranks.voting import Voting, difference, differences
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
def test_votes_joined_in_a_tree_give_the_decision_of_those_joined_at_once(
    votes: list[Vote], fan_in: int
) -> None:
    tree = Tree(len(votes), fan_in=fan_in)

    def tally(rank: int) -> Tally:
        own = through_json(Tally.of(rank, votes[rank]))
        return through_json(joined([own, *(tally(head) for head in tree.node(rank).heads)]))

    assert comparable(decide(tally(0), attempt="a1")) == comparable(decided(*votes))


def decided(*votes: Vote) -> Decision:
    return decide(joined([Tally.of(*each) for each in enumerate(votes)]), attempt="a1")


def vote(**changes: Any) -> Vote:
    return replace(Vote(Proposal("periodic"), True, False, next_step=50, step=7), **changes)


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([vote(), vote()], {"attempt": "a1", "next_step": 50}),
        ([vote(), vote(is_ready=False)], {"attempt": ""}),
        ([vote(is_written=True), vote()], {"attempt": "a1", "is_written": False}),
        (
            [vote(), vote(held_back="2 failed")],
            {"is_held_back": True, "defer": "2 failed (rank 1)"},
        ),
        ([vote(costs={"a": 1.0}), vote(costs={"a": 2.0})], {"costs": {"a": 2.0}}),
        ([vote(), vote(is_restructured=True)], {"compares": True}),
        (
            [vote(), vote(stop=Stop("a", "b", None))],
            {"stop": Stop("a (rank 1)", "b (rank 1)", None)},
        ),
        (
            [vote(metrics={"loss": 1.0}), vote(metrics={"loss": 2.0})],
            {"metrics": {"loss": 1.0}, "unequal": {"loss": [(0, 1.0), (1, 2.0)]}},
        ),
        # Half of the 14 boundaries that there is time for.
        (
            [vote(), vote(end=Stop("slurm", "limit", 25.0), needs=Needs(10.0, 1.0))],
            {"next_step": 14},
        ),
        # Rank 0 failed step 20, rank 1 has not committed 30 yet: nothing is in both but 10.
        (
            [vote(durable=((10, "a"), (30, "c"))), vote(durable=((10, "a"), (20, "b")))],
            {"confirmed_step": 10},
        ),
        ([vote(durable=((20, "b"),)), vote(durable=None)], {"confirmed_step": 20}),
        # The same number, but not the same checkpoint.
        ([vote(durable=((20, "b"),)), vote(durable=((20, "x"),))], {"confirmed_step": None}),
    ],
)
def test_what_ranks_decide_from_what_they_say(votes: list[Vote], expected: dict[str, Any]) -> None:
    found = decided(*votes)
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_tally_of_a_thousand_ranks_is_about_as_long_as_a_vote() -> None:
    own = Vote(
        Proposal(), is_ready=False, is_written=False, metrics={"loss": 1.0}, costs={"a": 2.0}
    )
    one = json.dumps(tally_json(Tally.of(0, own)))
    differing = [
        Tally.of(rank, replace(own, metrics={"loss": float(rank)})) for rank in range(1000)
    ]
    assert len(json.dumps(tally_json(joined(differing)))) < 2 * len(one)


class OneRank:
    """Meetings of a single rank, whose words go through JSON as they do between ranks."""

    def act(self, phase: str, action: Callable[[], Any], *, merge: Merge) -> Any:
        word = json.loads(json.dumps(merge.of_one(0, action())))
        return json.loads(json.dumps(merge.decide(merge.join([word]))))


@pytest.mark.parametrize("place", [None, *SnapshotPlace])
def test_a_decision_arrives_as_it_was_made(place: SnapshotPlace | None) -> None:
    own = vote(proposal=Proposal("periodic", place=place))
    decision = Voting(OneRank()).agree("step()", lambda: own, state=None)  # type: ignore[arg-type]
    assert decision == decide(Tally.of(0, own), attempt=decision.attempt)
    assert decision.place is place


def test_a_difference_is_told_by_rank_and_name_and_not_without_end() -> None:
    first = {f"model.{n}": "float32[2]" for n in range(20)}
    text = difference({**first, "model.3": "float32[4]"}, first)
    assert text == "model.3 is float32[4], on rank 0 float32[2]"
    told = differences([(text, [[1, 1], [3, 3]]), ("b", [[2, 2]])])
    assert f"ranks 1, 3: {text} | rank 2: b" in told
    assert "and 15 more" in difference({}, first)
