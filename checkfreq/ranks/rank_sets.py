"""Sets of ranks as JSON that stays small: ascending runs ``[first, last]``, apart from one another.

"All 1,024 ranks" is one pair of numbers. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

#: Runs ``(first, last)``, ascending; JSON makes lists of the pairs.
RankSet: TypeAlias = Sequence[Sequence[int]]

NONE: RankSet = ()

#: Runs of more ranks than this are written as "16 to 31".
_LISTED = 8


def of_ranks(ranks: Iterable[int]) -> RankSet:
    """The set of these ranks, given in any order."""
    return united((rank, rank) for rank in sorted(ranks))


def united(runs: Iterable[Sequence[int]]) -> RankSet:
    """Runs that ascend, with neighbours made one."""
    found: list[Sequence[int]] = []
    for first, last in runs:
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def members(ranks: RankSet) -> list[int]:
    """Every rank of a set."""
    return [rank for first, last in ranks for rank in range(first, last + 1)]


def listed(ranks: Iterable[int]) -> str:
    """Ranks as text, long runs of them by their ends: "0, 3, 16 to 31"."""
    texts: list[str] = []
    for first, last in of_ranks(ranks):
        run = range(first, last + 1)
        texts += [f"{first} to {last}"] if len(run) > _LISTED else map(str, run)
    return ", ".join(texts)


def names_of(ranks: Iterable[int]) -> str:
    """Ranks as words of a sentence: "rank 3", "ranks 1, 2", "ranks 16 to 31"."""
    ranks = list(ranks)
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
