"""The saved position in the data: the numbers that determine every later batch.

An iterator saves a ``Position`` in a checkpoint, as a JSON-able dictionary below 1 kB with its own
checksum. The fields of ``Identity`` must agree on a restore (which data, in which order); those of
``Layout`` may change (how the data is spread over ranks and processes).

Terms, here and in the whole package: a *place* is an index in an epoch's order, counted over all
ranks; a *sample id* is an index in the dataset; a *position* is a whole saved state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

from iterators.errors import CorruptPositionError, ResumeMismatchError
from iterators.order.ledger import Ledger

POSITION_VERSION = 2

_ADVICE = {
    "algorithm": "Use the kind of loader of the interrupted run: shuffle (or do not) as it did, "
    "and give an iterable dataset the same methods (state_dict, indexed_source).",
    "n": "Restore with the dataset the checkpoint was trained on, or start a new run.",
    "fingerprint": "The dataset was swapped, renamed or edited, or it is split or shuffled without "
    "a seed. If it holds the same samples in the same order, name it in both runs: by a method "
    "data_fingerprint() of the dataset, or fingerprint='...' (ResumableDataLoader, samplers).",
    "seed": "Use the seed of the interrupted run.",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Which data, in which order. A position fits only a loader of equal identity.

    ``n`` is the number of places in an epoch (0 for an iterable or replayed loader, which does not
    know). ``tail`` is the policy for the last, partial batch; it may change, with a warning, as
    ``samples`` may, see ``sample_digests``.
    """

    algorithm: str
    n: int
    fingerprint: str
    seed: int
    tail: str = "short"
    samples: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the data is spread. Saved for the log, and for adapters that cannot change it.

    ``batch`` is the batch size per rank; ``versions`` those of the libraries that load the data.
    """

    world: int = 1
    batch: int = 0
    workers: int = 0
    versions: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form."""
        return {
            "world": self.world,
            "batch": self.batch,
            "workers": self.workers,
            "versions": dict(self.versions),
        }


@dataclass(frozen=True, slots=True)
class Position:
    """One point of a run: ``position`` places into ``epoch``, after ``step`` boundaries.

    ``ledger`` covers the samples of this epoch before the point (only this rank's, if several ranks
    load: see ``merged``). ``states`` holds each rank's own loader state (JSON-able), for loaders
    that need more than the place to continue; it is empty for all others. ``ranks`` tells to which
    of the ``layout.world`` ranks the ledger and the states belong; it is empty if to all.
    ``left_at`` is the place at which the loop left an earlier epoch; 0 if it left none.
    """

    identity: Identity
    epoch: int = 0
    position: int = 0
    step: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    layout: Layout = field(default_factory=Layout)
    states: tuple[Any, ...] = ()
    ranks: tuple[int, ...] = ()
    left_at: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The JSON-able form that ``from_dict`` reads: 500 bytes plus ``states``, about 10 us."""
        state = {
            "version": POSITION_VERSION,
            "algorithm": self.identity.algorithm,
            "n": self.identity.n,
            "fingerprint": self.identity.fingerprint,
            "seed": self.identity.seed,
            "tail": self.identity.tail,
            "epoch": self.epoch,
            "position": self.position,
            "step": self.step,
            "ledger": self.ledger.to_dict(),
            "layout": self.layout.to_dict(),
            "states": list(self.states),
        }
        if self.identity.samples:
            state["samples"] = dict(self.identity.samples)
        if self.ranks:
            state["ranks"] = list(self.ranks)
        if self.left_at:
            state["left_at"] = self.left_at
        return {**state, "check": _check(state)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Position:
        """Read a saved position; ``CorruptPositionError`` if any field is damaged."""
        _require_intact(state)
        try:
            return cls._parsed(state)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptPositionError(
                f"the saved position cannot be read ({type(error).__name__}: {error})"
            ) from error

    @classmethod
    def _parsed(cls, state: Mapping[str, Any]) -> Position:
        numbers = {name: _count(state, name) for name in ("n", "seed", "epoch", "position", "step")}
        n, place = numbers["n"], numbers["position"]
        if n and place > n:
            raise ValueError(f"position {place} is past the end of an epoch of {n} places")
        texts = [_text(state, name) for name in ("algorithm", "fingerprint", "tail")]
        layout = state["layout"]
        return cls(
            Identity(texts[0], n, texts[1], numbers["seed"], texts[2], _samples(state)),
            numbers["epoch"],
            place,
            numbers["step"],
            Ledger.from_dict(state["ledger"]),
            Layout(
                _count(layout, "world"),
                _count(layout, "batch"),
                _count(layout, "workers"),
                tuple(layout["versions"].items()),
            ),
            tuple(_list(state, "states")) if state["version"] > 1 else (),
            _ranks(state) if "ranks" in state else (),
            _count(state, "left_at") if "left_at" in state else 0,
        )

    def require(self, live: Identity) -> None:
        """Raise ``ResumeMismatchError`` unless this position belongs to the data of ``live``."""
        for name, advice in _ADVICE.items():
            expected, found = getattr(self.identity, name), getattr(live, name)
            if expected != found:
                raise ResumeMismatchError(name, expected=expected, found=found, advice=advice)

    def merged(self, *others: Position) -> Position:
        """One global position from the positions of all ranks, in rank order.

        The ledgers are added and the states are listed by rank. All else must be equal, except the
        workers and versions. A share of the data that several ranks load (tensor parallelism)
        counts once. ``ValueError`` if the ranks are not at the same point, or some are missing.
        """
        for number, other in enumerate(others, 1):
            _require_same_point(self, other, number)
        parts = _one_per_share((self, *others))
        ledger = sum((part.ledger for part in parts), Ledger())
        states = tuple(state for part in parts for state in part.states)
        whole = _without_own_samples((self, *others))
        return replace(whole, ledger=ledger, states=states, ranks=())


def merge_saved(states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The one position for every rank, from what all ranks saved, in rank order.

    None if the ranks did not share the data (each was alone in its world) and their positions
    differ: then each rank continues from its own. ``CorruptPositionError`` if a position is damaged
    or missing, or if the ranks are not at the same point; the message names the rank.
    """
    positions = [_saved_by(rank, state) for rank, state in enumerate(states)]
    if not positions:
        raise CorruptPositionError("there is no position of any rank to continue from")
    if all(one.layout.world == 1 for one in positions):
        are_equal = all(one == positions[0] for one in positions)
        return _without_own_samples(positions).to_dict() if are_equal else None
    try:
        return positions[0].merged(*positions[1:]).to_dict()
    except ValueError as error:
        raise CorruptPositionError(
            f"the positions of {len(positions)} rank(s) cannot be merged: {error}"
        ) from error


def _without_own_samples(positions: Sequence[Position]) -> Position:
    """The first position; without ``samples`` if each rank holds others in memory."""
    first, *others = positions
    if all(one.identity.samples == first.identity.samples for one in others):
        return first
    return replace(first, identity=replace(first.identity, samples={}))


def _saved_by(rank: int, state: Mapping[str, Any]) -> Position:
    try:
        return Position.from_dict(state)
    except CorruptPositionError as error:
        raise CorruptPositionError(f"rank {rank}: {error}") from error


def _require_same_point(first: Position, other: Position, number: int) -> None:
    """``number`` is the index of ``other``, which names it where it has no ``ranks``."""
    ranks = f"rank {_named(first.ranks or (0,))}", f"rank {_named(other.ranks or (number,))}"
    if first.identity != other.identity:
        raise ValueError(
            f"ranks read different data: {ranks[0]} {first.identity}, {ranks[1]} {other.identity}"
        )
    here, there = _point(first), _point(other)
    if here != there:
        raise ValueError(
            f"ranks are at different points: {ranks[0]} at {here}, {ranks[1]} at {there}"
        )


def _point(position: Position) -> str:
    layout = position.layout
    return (
        f"epoch {position.epoch}, place {position.position}, step {position.step} (world "
        f"{layout.world}, batch {layout.batch})"
    )


def _one_per_share(parts: tuple[Position, ...]) -> list[Position]:
    """One position for each share of the data, sorted by rank; each must be there.

    Positions that do not say to which ranks they belong are returned as they are.
    """
    if not any(part.ranks for part in parts):
        return list(parts)
    shares: dict[tuple[int, ...], Position] = {}
    for part in parts:
        same = shares.setdefault(part.ranks, part)
        if (same.ledger, same.states) != (part.ledger, part.states):
            raise ValueError(f"two positions of rank(s) {_named(part.ranks)} differ")
    found = sorted(rank for ranks in shares for rank in ranks)
    world = parts[0].layout.world
    if found != list(range(world)):
        raise ValueError(
            f"positions of ranks {_named(range(world))} are needed, found: {_named(found)}"
        )
    return [shares[ranks] for ranks in sorted(shares)]


def _named(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks)) or "all"


def _require_intact(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise CorruptPositionError(f"a position is a dictionary, got {type(state).__name__}")
    version = state.get("version")
    if type(version) is int and version > POSITION_VERSION:
        raise CorruptPositionError(
            f"the position was written by a newer version of this library (format {version}; "
            f"this version reads up to {POSITION_VERSION}): upgrade to resume from it"
        )
    content = {name: value for name, value in state.items() if name != "check"}
    if version not in (1, POSITION_VERSION) or state.get("check") != _check(content):
        raise CorruptPositionError("the saved position is damaged: its checksum does not match")


def _check(state: Mapping[str, Any]) -> int:
    try:
        text = json.dumps(state, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise CorruptPositionError(f"the saved position is not plain JSON: {error}") from error
    return crc32(text.encode())


def _count(state: Mapping[str, Any], name: str) -> int:
    value = state[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be a count, got {value!r}")
    return value


def _list(state: Mapping[str, Any], name: str) -> list[Any]:
    value = state[name]
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {value!r}")
    return value


def _ranks(state: Mapping[str, Any]) -> tuple[int, ...]:
    ranks = _list(state, "ranks")
    if not ranks or any(type(rank) is not int or rank < 0 for rank in ranks):
        raise ValueError(f"ranks must be a list of ranks, got {ranks!r}")
    return tuple(ranks)


def _samples(state: Mapping[str, Any]) -> dict[str, str]:
    samples = state.get("samples", {})
    if not isinstance(samples, dict):
        raise ValueError(f"samples must be a dictionary, got {samples!r}")
    return {place: _text(samples, place) for place in samples}


def _text(state: Mapping[str, Any], name: str) -> str:
    value = state[name]
    if type(value) is not str:
        raise ValueError(f"{name} must be text, got {value!r}")
    return value
