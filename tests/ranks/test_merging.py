"""Words joined anywhere in the tree are what rank 0 would make of each of them: properties."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkfreq.ranks import rank_sets
from checkfreq.ranks.merging import (
    Merge,
    agreeing,
    all_say,
    by_name,
    distinct,
    each,
    first_says,
    grouped,
    if_none_failed,
    said_by_each,
    some_say,
    who,
)
from checkfreq.ranks.tree import Tree

NAMES = st.sampled_from("abc")
SAID = st.none() | st.booleans() | st.integers(0, 3) | NAMES


def through_json(word: Any) -> Any:
    return json.loads(json.dumps(word))


def up(merge: Merge, said: Sequence[Any], fan_in: int) -> Any:
    """The decision where the tree joins the words, each of which goes through JSON."""
    tree = Tree(len(said), fan_in=fan_in)

    def word(rank: int) -> Any:
        own = through_json(merge.of_one(rank, said[rank]))
        below = [word(head) for head in tree.node(rank).heads]
        return through_json(merge.join([own, *below])) if below else own

    return through_json(merge.decide(word(0)))


FLAT: dict[str, tuple[Merge, Any, Any]] = {
    "each": (each(lambda said: said[-1]), SAID, lambda said: said[-1]),
    "said by each": (said_by_each, SAID, lambda said: said),
    "agreeing": (agreeing(lambda: 7), SAID, lambda said: 7),
    "first says": (first_says, SAID, lambda said: said[0]),
    "all say": (all_say, st.booleans(), all),
    "who": (who(list), st.booleans(), lambda said: [r for r, one in enumerate(said) if one]),
    "some say": (
        some_say,
        SAID,
        lambda said: [[r, one] for r, one in enumerate(said) if one is not None],
    ),
    "grouped": (
        grouped(lambda found: [[one, rank_sets.members(ranks)] for one, ranks in found]),
        SAID,
        lambda said: [
            [one, [r for r, other in enumerate(said) if same(one, other)]] for one in once(said)
        ],
    ),
    "distinct": (
        distinct(lambda found: [one for _, one in found], most=2),
        SAID,
        lambda said: once(said)[:2],
    ),
    "by name": (
        by_name(),
        st.lists(NAMES, unique=True),
        lambda said: {
            name: [r for r, names in enumerate(said) if name in names]
            for name in {name for names in said for name in names}
        },
    ),
}


def same(one: Any, other: Any) -> bool:
    return json.dumps(one) == json.dumps(other)  # True is not 1


def once(said: Sequence[Any]) -> list[Any]:
    return [one for r, one in enumerate(said) if not any(same(one, o) for o in said[:r])]


@pytest.mark.parametrize("name", FLAT)
@settings(max_examples=30)
@given(data=st.data(), world=st.integers(1, 20), fan_in=st.integers(1, 5))
def test_a_merge_decides_as_over_a_list_of_what_each_rank_said(
    name: str, data: st.DataObject, world: int, fan_in: int
) -> None:
    merge, said, flat = FLAT[name]
    words = data.draw(st.lists(said, min_size=world, max_size=world))
    assert up(merge, words, fan_in) == flat(words)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=20),
    st.integers(1, 5),
)
def test_what_fails_anywhere_is_told_by_rank_and_else_all_is_merged(
    ranks: list[tuple[bool, int]], fan_in: int
) -> None:
    said = [{"failed": str(n)} if fails else {"done": n} for fails, n in ranks]
    failed = [[rank, str(n)] for rank, (fails, n) in enumerate(ranks) if fails]
    expected = {"failed": failed} if failed else {"done": sum(n for _, n in ranks)}
    assert up(if_none_failed(each(sum)), said, fan_in) == expected


def test_a_word_of_many_ranks_that_say_the_same_is_as_long_as_one() -> None:
    for merge in (grouped(), distinct(list, most=2), who(list), by_name(), agreeing(), some_say):
        said: Any = ["a"] if merge.join is not some_say.join else None
        one = merge.of_one(1000, said)
        many = merge.join([merge.of_one(rank, said) for rank in range(1000)])
        assert len(json.dumps(many)) <= len(json.dumps(one))


# ---- the words themselves: flat, as rank 0 would judge what each rank said


# ---- sets of ranks
