"""The positions of all ranks become the one that every rank loads, or a sentence says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from iterators import CFIterator, CorruptPositionError, Position, ResumableDataLoader
from iterators.order.ledger import Ledger
from iterators.order.position import _check
from tests.iterators.datasets import Augmented, Plain
from tests.iterators.ranks import rank_of

make = rank_of(24)


def states_after(steps: int, *, world: int = 2, batch: int = 3) -> list[dict[str, Any]]:
    """What each rank saves after so many boundaries, as it comes back from a file."""
    ranks = [make(rank, world, batch) for rank in range(world)]
    for _ in zip(*(one.steps(steps) for one in ranks), strict=True):
        pass
    return [json.loads(json.dumps(one.state_dict())) for one in ranks]


def resealed(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    content = {name: value for name, value in {**state, **changes}.items() if name != "check"}
    content = {name: value for name, value in content.items() if value is not None}
    return {**content, "check": _check(content)}


@pytest.mark.parametrize("world", [1, 3])
def test_every_rank_of_any_world_continues_where_all_ranks_stood(world: int) -> None:
    merging = make(0, 1, 1)
    before = merging.state_dict()
    merged = merging.merged_state(states_after(2))
    assert merging.state_dict() == before
    assert merged is not None
    position = Position.from_dict(merged)
    assert (position.position, position.step, position.ledger.count) == (12, 2, 12)
    assert position.ranks == ()
    ranks = [make(rank, world, 4) for rank in range(world)]
    for one in ranks:
        one.load_state_dict(merged)
    assert merging.merged_state([one.state_dict() for one in ranks]) == resealed(
        merged, layout=ranks[0].state_dict()["layout"]
    )


def test_a_share_that_two_ranks_load_counts_once() -> None:
    """Tensor parallel: ranks 0 and 1 read the first share, 2 and 3 the second."""
    first, second = states_after(2)
    merged = make(0, 2, 3).merged_state([first, first, second, second])
    assert merged == make(0, 2, 3).merged_state([first, second])
    assert merged == make(0, 2, 3).merged_state([second, first])


States = list[dict[str, Any]]
REFUSED: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], States], list[str]]] = {
    "another point": (
        lambda first, second: [first, states_after(3)[1]],
        ["rank 0 at epoch 0, place 12, step 2", "rank 1 at epoch 0, place 18, step 3"],
    ),
    "another layout": (
        lambda first, second: [first, states_after(1, batch=6)[1]],
        ["batch 3", "batch 6"],
    ),
    "other data": (
        lambda first, second: [first, resealed(second, seed=5)],
        ["ranks read different data: rank 0", "seed=5"],
    ),
    "a missing rank": (lambda first, second: [second], ["ranks 0, 1 are needed, found: 1"]),
    "none": (lambda first, second: [], ["there is no position of any rank"]),
    "two of a rank": (
        lambda first, second: [first, second, resealed(second, ledger=Ledger.of([1]).to_dict())],
        ["two positions of rank(s) 1 differ"],
    ),
    "damage": (lambda first, second: [first, {**second, "step": 9}], ["rank 1: the saved pos"]),
    "no ranks": (lambda first, second: [first, resealed(second, ranks=[-1])], ["cannot be read"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_states_that_do_not_belong_together_are_refused_naming_ranks(kind: str) -> None:
    states, named = REFUSED[kind]
    with pytest.raises(CorruptPositionError) as caught:
        make(0, 2, 3).merged_state(states(*states_after(2)))
    for part in named:
        assert part in str(caught.value)


def test_states_that_do_not_say_whose_they_are_are_taken_in_the_order_given() -> None:
    """Version 1 did not, nor the first positions of version 2."""
    old = [resealed(state, ranks=None) for state in states_after(2)]
    oldest = [resealed(state, version=1, states=None) for state in old]
    expected = make(0, 2, 3).merged_state(states_after(2))
    assert make(0, 2, 3).merged_state(old) == expected
    assert make(0, 2, 3).merged_state(oldest) == expected


def alone(dataset: Any) -> CFIterator:
    return CFIterator(ResumableDataLoader(dataset, 2, rank=0, world=1))


def test_ranks_that_do_not_share_the_data_continue_each_from_its_own_if_they_differ() -> None:
    state, other = (alone(kind(8)).state_dict() for kind in (Plain, Augmented))
    assert alone(Plain(8)).merged_state([state, other]) is None
    assert alone(Plain(8)).merged_state([state, state]) == state
