"""Whether what ranks are to have alike is alike: at a run's first checkpoint, after a restore.

Of it the first rank's alone is kept, so what another rank had would be lost without a word.
Weights and their optimizer's state that are different are an error; a rounding error between
ranks, and what a forward pass or a rank's own code may change, are a warning.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from checkfreq.errors import StateError
from checkfreq.ranks.meetings import Meetings
from checkfreq.types import Json

_PHASE = "comparing the values of the state"
_SHOWN = 5
#: More are not told apart by their numbers.
_LOOKED_AT = 64
#: Of a tensor's largest number, what a rounding error may come to.
_ROUNDING = 0.05


class Compared(Protocol):
    """Who knows the values: the pipeline."""

    def values_digest(self) -> str | None:
        """Equal on ranks of equal values; None while devices are not done."""
        ...

    def values_listing(self) -> dict[str, str]:
        """A digest of each, by name."""
        ...

    def weights(self) -> Collection[str]:
        """Names of what only a weight update changes."""
        ...

    def samples(self, names: Collection[str]) -> dict[str, list[float]]:
        """Some numbers of each of these tensors."""
        ...


@dataclass(frozen=True, slots=True)
class Differing:
    """Names of what differs from rank 0's, and the ranks on which it does."""

    lost: Mapping[str, Sequence[int]]
    doubtful: Mapping[str, Sequence[int]]

    def __bool__(self) -> bool:
        return bool(self.lost or self.doubtful)


def compare(meetings: Meetings, state: Compared) -> Differing | None:
    """What differs; None if it is not known yet: the ranks are to ask again when they meet.

    Every meeting here is of all ranks, and more than one is held only where something differs.
    """
    verdict = meetings.act(_PHASE, state.values_digest, decide=_verdict)
    if verdict is None:
        return None
    if verdict:
        return Differing({}, {})
    listings = meetings.act(_PHASE, state.values_listing, decide=_listed)
    ranks = {name: tuple(found) for name, found in listings.items()}
    weights = [name for name in ranks if name in {*state.weights()}][:_LOOKED_AT]
    lost = meetings.act(_PHASE, lambda: state.samples(weights), decide=_of_other_content)
    return Differing(
        {name: ranks[name] for name in ranks if name in lost},
        {name: ranks[name] for name in ranks if name not in lost},
    )


def _verdict(digests: Sequence[Json]) -> Json:
    return None if None in digests else len(set(digests)) == 1


def _listed(listings: Sequence[Mapping[str, str]]) -> Json:
    """By name, the ranks whose digest is not rank 0's. What one rank left out is left out."""
    names = [n for n in listings[0] if all(n in listing for listing in listings)]
    found = {
        name: [rank for rank, listing in enumerate(listings) if listing[name] != listings[0][name]]
        for name in names
    }
    return {name: ranks for name, ranks in found.items() if ranks}


def _of_other_content(samples: Sequence[Mapping[str, Sequence[float]]]) -> Json:
    """Names of the tensors whose numbers differ by more than rounding explains."""
    first, others = samples[0], samples[1:]
    return [n for n in first if not all(is_rounding(first[n], o.get(n, first[n])) for o in others)]


def is_rounding(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether numbers are the same but for rounding; infinities and NaN have to be the same."""
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
    """For weights of which only the first rank's are kept."""
    return StateError(
        f"ranks hold different values of what is to be the same on all of them: "
        f"{listed(found.lost)}. Of it the first rank's alone is kept, in the checkpoint of step "
        f"{step} too: the others' would be lost. Name what each rank has of its own in "
        "CFCheckpoint(per_rank=...), tensors of a module or whole objects; make equal what "
        "should be; or pass CFConfig(compare_ranks=False) if the first rank's is the one to keep"
    )


def doubtful_text(found: Differing) -> str:
    """For what may well be meant so."""
    return (
        f"values that are taken to be the same on all ranks differ: {listed(found.doubtful)}. The "
        "first rank's are kept, and every rank gets them at a restore. Name what each rank has of "
        "its own in CFCheckpoint(per_rank=...)"
    )


def listed(ranks: Mapping[str, Sequence[int]]) -> str:
    """The first few names, with the ranks that differ from rank 0."""
    shown = [f"{name} (rank {', '.join(map(str, found))})" for name, found in ranks.items()]
    more = [f"and {len(shown) - _SHOWN} more"] * (len(shown) > _SHOWN)
    return ", ".join([*shown[:_SHOWN], *more])
