"""The words that go up the tree: what ranks said, or why there is nothing to decide. Pure.

A word is one of:

- ``{"phase", "said"}``: all ranks of the block came, and said this together;
- ``{"left", "phases"}``: some left the run (pairs of rank and reason), or came to different
  meetings (pairs of phase and ranks);
- ``{"lost"}``: some did not come; the error for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checkfreq.errors import CheckFreqError, ConfigError, RankError, StateError
from checkfreq.ranks.merging import Join
from checkfreq.ranks.rank_sets import RankSet, members, names_of, united
from checkfreq.types import Json

#: Errors that a decision raises on every rank, by their names in a reply.
_AGREED: dict[str, type[CheckFreqError]] = {"ConfigError": ConfigError, "StateError": StateError}


def left(rank: int, why: str) -> Json:
    """The word of a rank that leaves the run."""
    return {"left": [[rank, why]], "phases": []}


def lost(error: RankError) -> Json:
    """The word of a rank to which some did not come."""
    return {"lost": of_error(error)}


def joined(words: Sequence[tuple[range, Json]], join: Join) -> Json:
    """The word of the successive blocks of ranks whose words these are."""
    for _, word in words:
        if "lost" in word:
            return word
    left = [pair for _, word in words for pair in word.get("left", ())]
    phases = _phases(words)
    if left or len(phases) > 1:
        return {"left": left, "phases": [[phase, ranks] for phase, ranks in phases.items()]}
    return {"phase": next(iter(phases)), "said": join([word["said"] for _, word in words])}


def _phases(words: Sequence[tuple[range, Json]]) -> dict[str, RankSet]:
    """The ranks in each phase, in the order of their first ranks."""
    found: dict[str, list[Sequence[int]]] = {}
    for block, word in words:
        own = [[word["phase"], [(block[0], block[-1])]]] if "phase" in word else word["phases"]
        for phase, ranks in own:
            found.setdefault(phase, []).extend(ranks)
    return {phase: united(ranks) for phase, ranks in found.items()}


def reply(word: Json, phase: str, decide: Callable[[Json], Json]) -> Json:
    """What all ranks receive; ``word`` is that of all, and rank 0 is in ``phase``."""
    if "lost" in word:
        return word["lost"]
    try:
        if gone := word.get("left"):
            texts = "; ".join(f"rank {rank} left the run: {why}" for rank, why in gone)
            raise RankError(f"{phase}: {texts}", ranks=[rank for rank, _ in gone], phase=phase)
        if "phases" in word:
            raise _apart(word["phases"])
        return {"reply": decide(word["said"])}
    except (ConfigError, StateError, RankError) as error:
        return of_error(error)


def _apart(phases: Sequence[tuple[str, RankSet]]) -> RankError:
    (own, _), *others = phases
    where = "; ".join(
        f"{names_of(members(ranks))} {_verb(ranks)} in {phase}" for phase, ranks in others
    )
    return RankError(
        f"the ranks do different things: rank 0 is in {own}, {where}. step(), save(), restore(), "
        "wait(), finish() and close() are for all ranks together, in the same order",
        ranks=sorted(rank for _, ranks in others for rank in members(ranks)),
        phase=own,
    )


def _verb(ranks: RankSet) -> str:
    return "is" if len(members(ranks)) == 1 else "are"


def of_error(error: CheckFreqError) -> Json:
    """The reply that raises this error on every rank."""
    ranks = list(error.ranks) if isinstance(error, RankError) else []
    phase = error.phase if isinstance(error, RankError) else ""
    return {"error": type(error).__name__, "text": str(error), "ranks": ranks, "phase": phase}


def raised(reply: Json) -> CheckFreqError:
    """The error of such a reply."""
    kind = _AGREED.get(reply["error"])
    if kind is not None:
        return kind(reply["text"])
    return RankError(reply["text"], ranks=reply["ranks"], phase=reply["phase"])
