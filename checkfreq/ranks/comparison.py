"""Compares replicated state across ranks: at a run's first checkpoint, and after a restore.

Only the first rank's copy of replicated state is saved, so values that differ on another rank would
be lost silently. Different weights or optimizer state are an error. Differences of the size of
rounding errors, and state that a forward pass or a rank's own code may change, are a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from checkfreq.errors import StateError
from checkfreq.ranks.meetings import Meetings
from checkfreq.ranks.merging import Merge, by_name, first_of, first_says
from checkfreq.types import Json

T = TypeVar("T")

_PHASE = "comparing the values of the state"
_SHOWN = 5
#: Only so many tensors are sampled, to tell rounding from different content.
_LOOKED_AT = 64
#: A difference of up to this fraction of a tensor's largest number counts as rounding.
_ROUNDING = 0.05


class Compared(Protocol):
    """What knows the values: `run.replicas`."""

    def values_digest(self) -> str | None:
        """Equal on ranks with equal values; None while devices are still computing it."""
        ...

    def values_listing(self) -> dict[str, str]:
        """The digest of each value, by name."""
        ...

    def weights(self) -> Collection[str]:
        """Names of the state that only a weight update changes."""
        ...

    def samples(self, names: Collection[str]) -> dict[str, list[float]]:
        """A few evenly spaced numbers of each of these tensors."""
        ...


@dataclass(frozen=True, slots=True)
class Differing:
    """What differs from rank 0: names, each with the ranks on which it differs."""

    lost: Mapping[str, Sequence[int]]
    doubtful: Mapping[str, Sequence[int]]

    def __bool__(self) -> bool:
        return bool(self.lost or self.doubtful)


def compare(meetings: Meetings, state: Compared) -> Differing | None:
    """What differs; None if devices have not finished: ask again at the next meeting.

    One meeting of all ranks, and further ones only if something differs.
    """
    verdict = meetings.act(_PHASE, state.values_digest, merge=_DIGESTS)
    if verdict is None:
        return None
    if verdict:
        return Differing({}, {})
    differ, lack = _against_first(meetings, state.values_listing, _differing)
    ranks = {name: found for name, found in differ.items() if name not in lack}
    weights = [name for name in ranks if name in {*state.weights()}][:_LOOKED_AT]
    lost, _ = _against_first(meetings, lambda: state.samples(weights), _of_other_content)
    return Differing(
        {name: ranks[name] for name in ranks if name in lost},
        {name: ranks[name] for name in ranks if name not in lost},
    )


def _joined_digests(words: Sequence[Json]) -> Json:
    pairs = first_of([word["digests"] for word in words], 2)
    return {"is_known": all(word["is_known"] for word in words), "digests": pairs}


#: Whether all say the same; None if some say None.
_DIGESTS = Merge(
    lambda rank, digest: {"is_known": digest is not None, "digests": [(rank, digest)]},
    _joined_digests,
    lambda word: len(word["digests"]) == 1 if word["is_known"] else None,
)


def _against_first(
    meetings: Meetings,
    look: Callable[[], Mapping[str, T]],
    differing: Callable[[Mapping[str, T], Mapping[str, T]], Sequence[str]],
) -> tuple[dict[str, Sequence[int]], Collection[str]]:
    """By name, in the order of rank 0's, the ranks that differ from it; and names that some lack.

    ``differing(rank 0's, own)`` says in which names. Rank 0's listing goes to all, and each
    compares its own, so that what is said does not grow with the number of ranks.
    """
    own: dict[str, T] = {}

    def listing() -> Mapping[str, T]:
        own.update(look())
        return own

    first = meetings.act(_PHASE, listing, merge=first_says)

    def said() -> list[Sequence[str]]:
        there = {name: value for name, value in first.items() if name in own}
        return [differing(there, own), [name for name in first if name not in own]]

    differ, lack = meetings.act(_PHASE, said, merge=_NAMES)
    return {name: tuple(differ[name]) for name in first if name in differ}, lack


def _joined_names(words: Sequence[Json]) -> Json:
    return [_BY_NAME.join([word[0] for word in words]), _BY_NAME.join([word[1] for word in words])]


_BY_NAME = by_name()
#: Names that differ, names that are not there: by name, the ranks that say so.
_NAMES = Merge(
    lambda rank, said: [_BY_NAME.of_one(rank, names) for names in said],
    _joined_names,
    lambda word: [_BY_NAME.decide(names) for names in word],
)


def _differing(first: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    return [name for name in first if own[name] != first[name]]


def _of_other_content(
    first: Mapping[str, Sequence[float]], own: Mapping[str, Sequence[float]]
) -> list[str]:
    """Names of the tensors whose numbers differ by more than rounding explains."""
    return [name for name in first if not is_rounding(first[name], own[name])]


def is_rounding(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether numbers are equal up to rounding; infinities and NaN must be identical."""
    if len(one) != len(other):
        return False
    pairs = list(zip(one, other, strict=True))
    odd = [pair for pair in pairs if not all(map(math.isfinite, pair))]
    if any(repr(a) != repr(b) for a, b in odd):
        return False
    finite = [pair for pair in pairs if all(map(math.isfinite, pair))]
    largest = max((abs(number) for pair in finite for number in pair), default=0.0)
    return all(abs(a - b) <= _ROUNDING * largest for a, b in finite)


def lost_error(found: Differing, *, step: int) -> StateError:
    """The error for weights that differ: only the first rank's would be saved."""
    return StateError(
        f"ranks hold different values where all should hold the same: {listed(found.lost)}. Only "
        f"the first rank's values are saved, also in the checkpoint of step {step}: the others' "
        "would be lost. Name state that differs between ranks in CFCheckpoint(per_rank=...), "
        "tensors of a module or whole objects; make the ranks equal if they should be; or pass "
        "CFConfig(compare_ranks=False) to keep the first rank's values"
    )


def doubtful_text(found: Differing) -> str:
    """The warning for differences that may be intended."""
    return (
        f"values that should be the same on all ranks differ: {listed(found.doubtful)}. The first "
        "rank's are saved, and a restore gives them to every rank. Name state that differs between "
        "ranks in CFCheckpoint(per_rank=...)"
    )


def listed(ranks: Mapping[str, Sequence[int]]) -> str:
    """The first few names, each with the ranks that differ from rank 0."""
    shown = [f"{name} (rank {', '.join(map(str, found))})" for name, found in ranks.items()]
    more = [f"and {len(shown) - _SHOWN} more"] * (len(shown) > _SHOWN)
    return ", ".join([*shown[:_SHOWN], *more])
