"""How what many ranks say becomes one decision, wherever in the tree words meet. Pure.

Words are joined in the order of the ranks, in any grouping: ``join`` must be associative. A word
of many ranks should be about as long as that of one, since every node reads its children's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from checkfreq.ranks.rank_sets import members, of_ranks, united
from checkfreq.types import Json

Join = Callable[[Sequence[Json]], Json]


@dataclass(frozen=True, slots=True)
class Merge:
    """``of_one(rank, said)`` is one rank's word; ``join(words)`` that of successive ranks, or of
    successive groups of them; ``decide(word)`` the decision, from the word of all: on rank 0.
    """

    of_one: Callable[[int, Json], Json]
    join: Join
    decide: Callable[[Json], Json]


def _itself(word: Json) -> Json:
    return word


def each(decide: Callable[[Sequence[Json]], Json]) -> Merge:
    """Decides from what each rank said, in their order. Words grow with the number of ranks."""
    return Merge(lambda rank, said: [said], lambda words: [s for w in words for s in w], decide)


#: Decides nothing: every rank receives what each rank said. Words grow with the number of ranks.
said_by_each = each(_itself)


def agreeing(decide: Callable[[], Json] = lambda: None) -> Merge:
    """For meetings to which every rank just comes; ``decide`` takes no word."""
    return Merge(lambda rank, said: None, lambda words: None, lambda word: decide())


#: What rank 0 said, for all.
first_says = Merge(lambda rank, said: said, lambda words: words[0], _itself)

#: Whether all ranks said True.
all_say = Merge(lambda rank, said: bool(said), all, _itself)


def who(decide: Callable[[list[int]], Json]) -> Merge:
    """Decides from the ranks that said True."""
    return Merge(
        lambda rank, said: of_ranks([rank] if said else []),
        lambda words: united(run for word in words for run in word),
        lambda word: decide(members(word)),
    )


#: What those ranks said that said something else than None: pairs (rank, what), by rank.
some_say = Merge(
    lambda rank, said: [] if said is None else [[rank, said]],
    lambda words: [pair for word in words for pair in word],
    _itself,
)


def grouped(decide: Callable[[Json], Json] = _itself) -> Merge:
    """Who said the same: pairs (what, ranks), by the first rank of each."""
    return Merge(lambda rank, said: [[said, of_ranks([rank])]], _grouped, decide)


def _grouped(words: Sequence[Json]) -> Json:
    found: dict[str, tuple[Json, list[Sequence[int]]]] = {}
    for said, ranks in (pair for word in words for pair in word):
        found.setdefault(json.dumps(said, sort_keys=True), (said, []))[1].extend(ranks)
    return [[said, united(ranks)] for said, ranks in found.values()]


def distinct(decide: Callable[[Json], Json], *, most: int) -> Merge:
    """Decides from what was said, each once: pairs (rank, what) by the first rank that said so.

    No more than ``most``, the first: enough to know whether all said the same.
    """
    return Merge(lambda rank, said: [[rank, said]], lambda words: first_of(words, most), decide)


def first_of(words: Sequence[Sequence[tuple[int, Json]]], most: int) -> list[tuple[int, Json]]:
    """The first ``most`` pairs (rank, what) of which each says something new."""
    found: dict[str, tuple[int, Json]] = {}
    for rank, said in (pair for word in words for pair in word):
        found.setdefault(json.dumps(said, sort_keys=True), (rank, said))
    return list(found.values())[:most]


def by_name(decide: Callable[[Mapping[str, list[int]]], Json] = _itself) -> Merge:
    """Every rank says names: decides from the ranks that said each, by name."""

    def join(words: Sequence[Json]) -> Json:
        found: dict[str, list[Sequence[int]]] = {}
        for word in words:
            for name, ranks in word.items():
                found.setdefault(name, []).extend(ranks)
        return {name: united(ranks) for name, ranks in found.items()}

    return Merge(
        lambda rank, said: {name: of_ranks([rank]) for name in said},
        join,
        lambda word: decide({name: members(ranks) for name, ranks in word.items()}),
    )


# ---- actions, of which some fail


def if_none_failed(merge: Merge) -> Merge:
    """``merge`` over {"done": said}; {"failed": pairs (rank, text)} if some rank failed."""

    def of_one(rank: int, said: Json) -> Json:
        if "failed" in said:
            return {"failed": [[rank, said["failed"]]]}
        return {"done": merge.of_one(rank, said["done"])}

    def join(words: Sequence[Json]) -> Json:
        failed = [pair for word in words for pair in word.get("failed", ())]
        return {"failed": failed} if failed else {"done": merge.join([w["done"] for w in words])}

    def decide(word: Json) -> Json:
        return word if "failed" in word else {"done": merge.decide(word["done"])}

    return Merge(of_one, join, decide)
