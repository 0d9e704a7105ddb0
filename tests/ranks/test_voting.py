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


def test_rank_0_decides_whether_a_checkpoint_is_due() -> None:
    assert decided(PERIODIC, NOTHING).attempt == "a1"
    assert decided(PERIODIC, NOTHING).place is SnapshotPlace.HOST
    assert decided(NOTHING, PERIODIC).attempt == ""


def test_a_periodic_one_is_deferred_on_all_if_one_rank_has_no_slot() -> None:
    decision = decided(PERIODIC, replace(NOTHING, is_ready=False))
    assert decision.attempt == ""
    assert "rank 1" in decision.defer


def test_one_that_must_be_taken_waits_for_the_rank_without_a_slot() -> None:
    must = replace(PERIODIC, proposal=Proposal("requested", must=True))
    decision = decided(must, replace(NOTHING, is_ready=False))
    assert decision.attempt == "a1"
    assert decision.waits_for == (1,)
    assert not decision.defer


def test_a_periodic_one_is_deferred_on_all_while_storage_fails_for_one_rank() -> None:
    failing = replace(NOTHING, held_back="2 failed in a row")
    decision = decided(PERIODIC, failing)
    assert (decision.attempt, decision.is_held_back) == ("", True)
    assert decision.defer == "2 failed in a row (rank 1)"
    requested = replace(PERIODIC, proposal=Proposal("requested", must=True))
    assert decided(requested, failing).attempt == "a1"
    assert not decided(PERIODIC, NOTHING).is_held_back


def test_a_late_one_is_deferred_with_its_reason() -> None:
    assert decided(replace(NOTHING, proposal=Proposal(why_late="late")), NOTHING).defer == "late"


def test_a_step_that_all_have_written_is_not_taken_again() -> None:
    written = replace(PERIODIC, is_written=True)
    assert decided(written, replace(NOTHING, is_written=True)).is_written
    assert decided(written, replace(NOTHING, is_written=True)).attempt == ""
    assert decided(written, NOTHING).attempt == "a1"


def test_a_stop_signal_on_any_rank_stops_all() -> None:
    assert decided(NOTHING, NOTHING).stop is None
    told = replace(NOTHING, stop=Stop("SIGTERM", "SIGTERM received", 30.0))
    expected = Stop("SIGTERM (rank 1)", "SIGTERM received (rank 1)", 30.0)
    assert decided(NOTHING, told).stop == expected


def ending(in_s: float, *, needs_s: float = 10.0, gap_s: float = 1.0, next_step: int = 50) -> Vote:
    """A rank at step 7 that knows an end ``in_s`` away."""
    end = Stop("slurm", "the time limit", in_s)
    return replace(NOTHING, end=end, needs=Needs(needs_s, gap_s), step=7, next_step=next_step)


def test_an_end_that_only_one_rank_knows_stops_all_when_the_slowest_has_to_start() -> None:
    ignorant = replace(NOTHING, needs=Needs(20.0, 2.0), step=7)
    assert decided(ending(22.5), ignorant).stop is None
    stop = decided(ignorant, ending(21.5)).stop
    assert stop == Stop("slurm (rank 1)", "the time limit (rank 1)", 21.5)


def test_the_earliest_of_several_ends_counts() -> None:
    stop = decided(ending(500.0), ending(3.0), ending(70.0)).stop
    assert stop is not None
    assert (stop.source, stop.ends_in_s) == ("slurm (rank 1)", 3.0)


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


def test_costs_are_those_of_the_slowest_rank() -> None:
    def costing(**costs: float) -> Vote:
        return replace(NOTHING, costs=costs)

    decision = decided(costing(persist_s=1.0, cost_s=0.3), costing(persist_s=2.0), costing())
    assert decision.costs == {"persist_s": 2.0, "cost_s": 0.3}


def test_structures_are_compared_when_one_has_changed() -> None:
    assert not decided(NOTHING, NOTHING).compares
    assert decided(NOTHING, replace(NOTHING, is_restructured=True)).compares


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


def test_rank_0s_marks_count_and_metrics_that_differ_are_told() -> None:
    nan = float("nan")
    one = replace(NOTHING, keep=True, metrics={"loss": 0.5, "same": 1.0, "odd": nan})
    other = replace(NOTHING, metrics={"loss": 0.7, "same": 1.0, "odd": nan, "alone": 3.0})
    silent = NOTHING
    decision = decided(one, other, silent)
    assert decision.keep
    assert decision.metrics == one.metrics
    assert decision.unequal == {
        "alone": [(0, None), (1, 3.0)],
        "loss": [(0, 0.5), (1, 0.7)],
    }


def test_metrics_that_only_rank_0_knows_are_no_difference() -> None:
    assert decided(replace(NOTHING, metrics={"loss": 0.5}), NOTHING).unequal == {}


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
