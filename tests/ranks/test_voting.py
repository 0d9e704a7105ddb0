"""What ranks decide from what they say: tables, no processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from checkfreq.policy.ending import Needs
from checkfreq.ranks.coordinator import Decision, Proposal
from checkfreq.ranks.merging import Merge
from checkfreq.ranks.tally import Tally, Vote, decide, joined
from checkfreq.ranks.voting import Voting, difference, differences
from checkfreq.run.notices import Stop
from checkfreq.types import SnapshotPlace

NOTHING = Vote(Proposal(), is_ready=True, is_written=False, next_step=7)
PERIODIC = replace(NOTHING, proposal=Proposal("periodic", place=SnapshotPlace.HOST))


def decided(*words: Vote) -> Decision:
    return decide(joined([Tally.of(*each) for each in enumerate(words)]), attempt="a1")


def ending(in_s: float, *, needs_s: float = 10.0, gap_s: float = 1.0, next_step: int = 50) -> Vote:
    """A rank at step 7 that knows an end ``in_s`` away."""
    end = Stop("slurm", "the time limit", in_s)
    return replace(NOTHING, end=end, needs=Needs(needs_s, gap_s), step=7, next_step=next_step)


def test_ranks_meet_in_time_for_the_end() -> None:
    """Half of the 14 boundaries that there is time for."""
    assert decided(ending(25.0), NOTHING).next_step == 7 + 7
    assert decided(ending(11.5), NOTHING).next_step == 8
    assert decided(ending(25.0, next_step=9), NOTHING).next_step == 9
    assert decided(replace(NOTHING, step=7, next_step=50), NOTHING).next_step == 50


def test_a_step_is_confirmed_once_every_directory_holds_the_same_attempt_of_it() -> None:
    def leader(*durable: tuple[int, str]) -> Vote:
        return replace(NOTHING, durable=durable)

    assert decided(leader((10, "a"), (20, "b")), NOTHING, leader((20, "b"))).confirmed_step == 20
    assert decided(leader((20, "b"), (30, "c")), leader((20, "b"))).confirmed_step == 20
    assert decided(leader((20, "b")), leader()).confirmed_step is None
    assert decided(leader((20, "b")), NOTHING).confirmed_step == 20
    # Rank 0 failed step 20, rank 1 has not committed 30 yet: nothing is in both but 10.
    held = leader((10, "a"), (30, "c")), leader((10, "a"), (20, "b"))
    assert decided(*held).confirmed_step == 10
    # The same number, but not the same checkpoint.
    assert decided(leader((20, "b")), leader((20, "x"))).confirmed_step is None


def test_a_difference_is_told_by_rank_and_name_and_not_without_end() -> None:
    first = {f"model.{n}": "float32[2]" for n in range(20)}
    second: dict[str, Any] = {**first, "model.3": "float32[4]"}
    text = difference(second, first)
    assert text == "model.3 is float32[4], on rank 0 float32[2]"
    assert differences([("", [[0, 0]]), (text, [[1, 1]])]).count(f"rank 1: {text}. ") == 1
    assert f"ranks 1, 3: {text} | rank 2: b" in differences(
        [(text, [[1, 1], [3, 3]]), ("b", [[2, 2]])]
    )
    assert "model.0 is not there" in difference({}, first)
    assert "and 15 more" in difference({}, first)


class OneRank:
    """Meetings of a single rank, whose words go through JSON as they do between ranks."""

    def act(self, phase: str, action: Callable[[], Any], *, merge: Merge) -> Any:
        word = json.loads(json.dumps(merge.of_one(0, action())))
        return json.loads(json.dumps(merge.decide(merge.join([word]))))


@pytest.mark.parametrize("place", [None, *SnapshotPlace])
def test_a_decision_arrives_as_it_was_made(place: SnapshotPlace | None) -> None:
    vote = replace(PERIODIC, proposal=replace(PERIODIC.proposal, place=place))
    decision = Voting(OneRank()).agree("step()", lambda: vote, state=None)  # type: ignore[arg-type]
    assert decision == decide(Tally.of(0, vote), attempt=decision.attempt)
    assert decision.place is place
