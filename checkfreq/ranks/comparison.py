"""Compares replicated state across ranks: at a run's first checkpoint, and after a restore.

Only the first rank's copy of replicated state is saved, so values that differ on another rank would
be lost silently. Different weights or optimizer state are an error. Differences of the size of
rounding errors, and state that a forward pass or a rank's own code may change, are a warning.
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
    """By name, the ranks whose digest differs from rank 0's; a name that one lacks is skipped."""
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
