"""Positions of iterators, on one rank and several, restored at the same and other world sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from checkfreq.errors import ConfigError
from checkfreq.state.positions import Positions, RankStates, by_name
from checkfreq.types import Role

State = dict[str, Any]


class Source:
    """An iterator without a way to merge."""

    marks_steps = False
    is_using_batch = False

    def __init__(self, place: str = "fresh") -> None:
        self.place = place

    def state_dict(self) -> State:
        return {"place": self.place, "layout": {"batch": 1}}

    def load_state_dict(self, state: State, /) -> None:
        if state["place"] == "refused":
            raise ValueError("refused")
        self.place = state["place"]

    def finish(self) -> None:
        self.place = "finished"


class Merging(Source):
    """One that shows what it merged; None where the ranks do not share the data."""

    def merged_state(self, states: Sequence[State]) -> State | None:
        places = [state["place"] for state in states]
        return None if "own" in places[0] else {"place": "+".join(places)}


def of_world(world: int) -> list[Positions]:
    group = tuple(range(world))
    return [Positions(Role(rank, world, group)) for rank in group]


def saved(ranks: list[Positions]) -> dict[str, RankStates]:
    """What a checkpoint of these ranks holds, as a restore is given it."""
    parts = [json.loads(json.dumps(one.read())) for one in ranks]
    return by_name(dict(enumerate(parts)))


def registered(ranks: list[Positions], source: type[Source], name: str = "train") -> list[Source]:
    sources = [source(f"{rank}") for rank in range(len(ranks))]
    for one, its in zip(ranks, sources, strict=True):
        one.register(name, its)
    return sources


def restored(world: int, states: Mapping[str, RankStates]) -> list[Positions]:
    ranks = of_world(world)
    for one in ranks:
        one.restore(states)
    return ranks


def places(sources: list[Source]) -> list[str]:
    return [source.place for source in sources]


@pytest.mark.parametrize(
    ("source", "world", "expected"),
    [
        (Merging, 1, ["0+1"]),
        (Merging, 3, ["0+1"] * 3),
        (Source, 3, ["0", "1", "0"]),  # its own, or the first rank's on a new rank
    ],
    ids=["merged on one rank", "merged on three", "cannot be merged"],
)
@pytest.mark.parametrize("late", [False, True], ids=["", "registered late"])
def test_a_source_gets_the_merged_position_or_its_own(
    source: type[Source], world: int, expected: list[str], late: bool
) -> None:
    before = of_world(2)
    registered(before, source)
    after = of_world(world)
    sources = [] if late else registered(after, source)
    for one in after:
        one.restore(saved(before))
    assert places(sources or registered(after, source)) == expected


def test_ranks_that_do_not_share_the_data_get_their_own_positions() -> None:
    after = restored(3, {"train": [{"place": "own 0"}, {"place": "own 1"}]})
    assert places(registered(after, Merging)) == ["own 0", "own 1", "own 0"]


def test_an_iterator_that_one_rank_had_is_restored_from_that_rank() -> None:
    before = of_world(3)
    before[1].register("val", Source("there"))
    states = saved(before)
    assert states["val"][0] is None
    for _ in range(2):  # a stale copy that another rank carries on would disturb the second
        after = restored(3, states)
        source = Merging()
        after[1].register("val", source)
        assert source.place == "there"
        states = saved(after)


def test_unclaimed_positions_are_carried_over_by_the_leader_at_any_world_size() -> None:
    before = of_world(3)
    registered(before, Merging)
    states = saved(before)
    for world in (2, 1, 5):
        states = saved(restored(world, states))
        assert [state is None for state in states["train"]] == [False] + [True] * (world - 1)
    assert places(registered(restored(3, states), Merging)) == ["0+1+2"] * 3
    assert places(registered(restored(4, states), Source)) == ["0", "1", "2", "0"]


def test_one_rank_carries_unclaimed_positions_over_unchanged() -> None:
    state = {"place": "somewhere", "layout": None}
    alone = Positions()
    alone.restore({"train": state})
    assert alone.read() == {"train": state}
    assert alone.layouts() == {"train": None}
    alone.restore({"train": [state]})
    assert alone.read() == {"train": state}
    states = saved(restored(2, {"train": state}))  # several carry over what one saved
    assert places(registered(restored(2, states), Merging)) == ["somewhere"] * 2


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_restore_can_be_undone_and_is_where_a_position_is_refused(is_refused: bool) -> None:
    positions, source = Positions(), Source("before")
    positions.register("train", source)
    positions.register("val", Source())
    states: dict[str, RankStates] = {
        "train": [{"place": "restored"}],
        "later": [{"place": "waits"}],
        "val": [{"place": "refused" if is_refused else "other"}],
    }
    if is_refused:
        with pytest.raises(ValueError, match="refused"):
            positions.restore(states)
    else:
        take_back = positions.restore(states)
        assert source.place == "restored"
        take_back()
    assert source.place == "before"
    assert positions.read().keys() == {"train", "val"}


def test_a_name_in_use_and_a_second_iterator_that_marks_steps_are_refused() -> None:
    class Marking(Source):
        marks_steps = True

    positions = Positions()
    positions.register("train", Marking())
    with pytest.raises(ConfigError, match="'train' is registered"):
        positions.register("train", Source())
    with pytest.raises(ConfigError, match="both mark steps"):
        positions.register("other", Marking())
