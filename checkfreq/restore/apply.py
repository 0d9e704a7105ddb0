"""Putting a loaded checkpoint into live objects, in place, or refusing before anything changed.

``prepare`` compares everything and lists every mismatch in one error. ``RestorePlan.apply``
first runs what may raise (user code, undone in reverse order if any of it does), then what only
copies. Generators and gradients that wait for an update are set last, by ``apply_last``. Afterwards
nothing live refers to the buffers, which may be reused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from checkfreq.errors import ConfigError, MismatchError, StateError, printable
from checkfreq.state.adapters.base import (
    Changes,
    Fallible,
    Findings,
    LoadedFile,
    RankFile,
    Saved,
)
from checkfreq.state.adapters.generic import tree_value
from checkfreq.state.adapters.module import module_state_dict
from checkfreq.state.adapters.optimizer_tree import optimizer_state_dict
from checkfreq.state.adapters.rng import prepare_rng, rng_state
from checkfreq.state.adapters.scaler import scaler_state_dict
from checkfreq.state.capture import GRADIENTS, POSITIONS, RNG, covers
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.codec import decode_tree
from checkfreq.state.gradients import prepare_gradients
from checkfreq.store.parts import file_name, stem_of
from checkfreq.types import Json

logger = logging.getLogger(__name__)

__all__ = [
    "Loaded",
    "LoadedFile",
    "RestorePlan",
    "materialise",
    "positions",
    "prepare",
    "require_rank",
]

#: Keys of a checkpoint's objects that are no tracked names.
_NO_OBJECTS = {RNG, POSITIONS, GRADIENTS}

_READERS: dict[str, Callable[[Saved], Any]] = {
    "module": module_state_dict,
    "optimizer": optimizer_state_dict,
    "scaler": scaler_state_dict,
    "object": tree_value,
    "dict": tree_value,
    "rng": rng_state,
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified checkpoint in memory: the manifest's objects, and its files by name.

    ``own``: by rank, what differs from rank to rank; empty for a checkpoint of one rank.
    """

    objects: Mapping[str, Json]
    files: Mapping[str, LoadedFile]
    own: Mapping[int, Mapping[str, Json]] = field(default_factory=dict)

    def saved(
        self, name: str, *, path: str, rank: int = 0, declared: Collection[str] = ()
    ) -> Saved:
        """The saved state of one object, as ``rank`` sees it.

        A new rank sees the first one's buffers, such as statistics of batch norms, and nothing
        of what is ``declared`` to be each rank's, be it written by one rank or by many.
        """
        mine = self.own.get(rank, {}).get(name, {})
        json = mine if "kind" in mine else self.objects[name]

        def is_not_declared(key: str) -> bool:
            names = self._names_of(name, key)
            return not any(covers(prefix, name, one) for prefix in declared for one in names)

        parts = list(self._parts(name, rank, is_not_declared))
        file = self.files.get(file_name(name))
        is_for_all = is_not_declared if self.is_new(rank) else _all
        return Saved(name, json, file, path=path, parts=parts, is_for_all=is_for_all)

    def saved_gradients(self, *, path: str, rank: int) -> Saved | None:
        """What waited for an update on ``rank``: nothing, if it did on others. None: nowhere."""
        ranks = [one for one in (rank, *self.own) if GRADIENTS in self.names(one)]
        if not ranks:
            return None
        found = self.saved(GRADIENTS, path=path, rank=ranks[0])
        if ranks[0] == rank:
            return found
        return Saved(GRADIENTS, {**found.json, "parameters": {}}, None, path=path)

    def _names_of(self, name: str, key: str) -> list[str]:
        """A tensor's key in an object, and the names that are tied to it."""
        owns = (own.get(name, {}) for own in self.own.values())
        ties = [json.get("aliases", {}) for json in (self.objects.get(name, {}), *owns)]
        return [key, *(tied for aliases in ties for tied, to in aliases.items() if to == key)]

    def _parts(
        self, name: str, rank: int, is_not_declared: Callable[[str], bool]
    ) -> Iterator[RankFile]:
        first = self._first() if self.is_new(rank) else None
        for other, own in sorted(self.own.items()):
            file = self.files.get(file_name(stem_of(name, other)))
            if file is not None:
                boxes = own.get(name, {}).get("shards", {})
                takes = is_not_declared if other == first else _all if other == rank else _nothing
                yield RankFile(file, boxes, is_own=takes)

    def names(self, rank: int) -> set[str]:
        """Names of the objects there are for ``rank``, "rng" and "$positions" among them."""
        mine = self.own.get(rank, {})
        return {*self.objects, *self._whole(rank), *({POSITIONS} & mine.keys())}

    def is_new(self, rank: int) -> bool:
        """Whether nothing is here of such a rank: none was, or it wrote to another directory."""
        if not self.own:
            return rank != 0
        return rank not in self.own or (not self._whole(rank) and any(map(self._whole, self.own)))

    def _whole(self, rank: int) -> list[str]:
        return [name for name, json in self.own.get(rank, {}).items() if _is_whole(name, json)]

    def _first(self) -> int | None:
        """The first rank of which there is more than positions."""
        return next(
            (rank for rank in sorted(self.own) if self.own[rank].keys() - {POSITIONS}), None
        )

    def positions(self, rank: int) -> Mapping[str, Json]:
        """JSON of the iterators' positions of one rank, by name."""
        objects = self.own.get(rank, {}) if self.own else self.objects
        found: Mapping[str, Json] = objects.get(POSITIONS, {})
        return found


def _is_whole(name: str, json: Json) -> bool:
    return name != POSITIONS and "kind" in json


def _all(key: str) -> bool:
    return True


def _nothing(key: str) -> bool:
    return False


@dataclass(slots=True)
class RestorePlan:
    """Changes that fit the live objects; ``positions`` are for the iterators to take."""

    positions: dict[str, dict[str, Any]]
    #: The same of every rank there was; ``positions`` are this rank's, of a new rank the first's.
    all_positions: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    _changes: list[Changes] = field(default_factory=list)
    _saved: list[Saved] = field(default_factory=list)
    _rng: Callable[[], None] | None = None
    _gradients: Callable[[], None] | None = None

    def apply(self) -> None:
        """``load``, then ``copy``."""
        self.load()
        self.copy()

    def load(self) -> Callable[[], None]:
        """Restore what goes through users' code; returns what undoes it. To be called once.

        Raises StateError naming the object whose ``load_state_dict`` raised; what had been
        loaded before is put back.
        """
        fallible = [change for changes in self._changes for change in changes.fallible]
        loaded = [(change, _backup(change)) for change in fallible]
        _load_all(loaded)

        def undo() -> None:
            _put_all_back(loaded)

        return undo

    def copy(self) -> None:
        """Restore everything else, but no generator; does not fail. To be called once."""
        for changes in self._changes:
            for copy in changes.copies:
                copy()
        self._changes.clear()
        for saved in self._saved:
            saved.forget()
        self._saved.clear()

    def apply_rng(self) -> None:
        """Set the random generators; the last thing before the first batch is fetched."""
        if self._rng is not None:
            self._rng()

    def apply_last(self) -> None:
        """Set generators and gradients, which a script may disturb until its first batch."""
        self.apply_rng()
        if self._gradients is not None:
            self._gradients()


def _backup(change: Fallible) -> Callable[[], None]:
    try:
        return change.backup()
    except Exception:  # user code, on the way to a restore that will most likely succeed
        logger.debug("no way back for %s", change.name, exc_info=True)
        return _no_backup


def _no_backup() -> None:
    raise StateError("its state before the restore could not be copied")


def _load_all(changes: list[tuple[Fallible, Callable[[], None]]]) -> None:
    for done, (change, _) in enumerate(changes, 1):
        try:
            change.load()
        except Exception as error:
            stuck = _put_all_back(changes[:done])
            raise StateError(_failure(change, error, stuck)) from error


def _put_all_back(changes: list[tuple[Fallible, Callable[[], None]]]) -> list[str]:
    """Undo what was loaded, the latest first; the names of what could not be undone."""
    return [again.name for again, back in reversed(changes) if not _put_back(again.name, back)]


def _failure(change: Fallible, error: Exception, stuck: list[str]) -> str:
    state = f"could not be put back: {', '.join(stuck)}" if stuck else "nothing was changed"
    return (
        f"{change.name}: loading its state from the checkpoint raised "
        f"{type(error).__name__}: {error}; {state}. Correct the object, or pass "
        f"exclude=({change.name.partition('.')[0]!r},)"
    )


def _put_back(name: str, back: Callable[[], None]) -> bool:
    try:
        back()
    except Exception:  # the user's load_state_dict again; the caller names the object
        logger.exception("%s could not be put back after a failed restore", name)
        return False
    return True


def prepare(
    chk: CFCheckpoint,
    loaded: Loaded,
    *,
    only: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    strict: bool = True,
    path: str,
    rank: int = 0,
    world: int = 1,
) -> RestorePlan:
    """Compare a checkpoint with the live objects of ``rank`` of ``world``; changes nothing.

    ``only`` and ``exclude`` choose tracked names, "rng" or iterators' names. Raises
    MismatchError listing everything that does not fit (``strict=False``: one WARNING instead),
    ConfigError for unknown names, CorruptCheckpointError for state that makes no sense,
    StateError for shards that are in another node's directory.
    """
    found = {r: _decode_positions(loaded, r, path) for r in sorted(loaded.own or {0})}
    everyones = {name for positions in found.values() for name in positions}
    chosen = _chooser(chk, loaded, everyones, only, exclude)
    findings = Findings()
    all_positions = {
        r: {name: value for name, value in positions.items() if chosen(name)}
        for r, positions in found.items()
    }
    mine = all_positions.get(rank, next(iter(all_positions.values())))
    plan = RestorePlan(mine, all_positions)
    names = loaded.names(rank) - _NO_OBJECTS
    elsewhere = {n for r in loaded.own for n in loaded.names(r)} - names - _NO_OBJECTS
    if loaded.is_new(rank):  # what all had, or one rank wrote alone, and is each rank's own now
        elsewhere |= names & chk.per_rank_objects
        names -= elsewhere
    for name in sorted(elsewhere & {*chk.tracked}):
        if chosen(name):
            findings.notes.append(f"{name} (each rank had its own, rank {rank} had none)")
    names |= elsewhere
    findings.missing += [
        f"{n} (the whole object)" for n in chk.tracked if n not in names and chosen(n)
    ]
    findings.unexpected += [f"{n} (the whole object)" for n in names - {*chk.tracked} if chosen(n)]
    for name in chk.tracked:
        if name in names and name not in elsewhere and chosen(name):
            saved = loaded.saved(name, path=path, rank=rank, declared=chk.per_rank)
            plan._saved.append(saved)
            plan._changes.append(_prepare_object(chk, saved, findings))
    if chk.rng and chosen(RNG):
        _prepare_rng(plan, loaded, findings, path, rank)
    if (waiting := loaded.saved_gradients(path=path, rank=rank)) is not None:
        optimizers = {name: one for name, one in chk.optimizers.items() if chosen(name)}
        plan._gradients = prepare_gradients(optimizers, waiting, findings, world=world)
    _report(findings, strict=strict, path=path)
    return plan


def _decode_positions(loaded: Loaded, rank: int, path: str) -> dict[str, dict[str, Any]]:
    saved = Saved(POSITIONS, {}, None, path=path)
    return {name: saved.decode(node) for name, node in loaded.positions(rank).items()}


def _chooser(
    chk: CFCheckpoint,
    loaded: Loaded,
    found: Iterable[str],
    only: Iterable[str] | None,
    exclude: Iterable[str],
) -> Callable[[str], bool]:
    own = (name for rank in loaded.own for name in loaded.names(rank))
    known = {*chk.tracked, *loaded.objects, *own, *found, RNG} - {POSITIONS, GRADIENTS}
    wanted = None if only is None else _choice("only", only, known)
    unwanted = _choice("exclude", exclude, known)
    return lambda name: (wanted is None or name in wanted) and name not in unwanted


def _choice(argument: str, names: Iterable[str], known: set[str]) -> set[str]:
    chosen = {names} if isinstance(names, str) else {*names}
    if unknown := sorted(chosen - known):
        raise ConfigError(
            f"restore({argument}=...): unknown {', '.join(unknown)}; "
            f"expected some of {', '.join(sorted(known))}"
        )
    return chosen


def _prepare_object(chk: CFCheckpoint, saved: Saved, findings: Findings) -> Changes:
    adapter = chk.adapters[saved.name]
    if saved.field("kind") != adapter.kind:
        findings.different.append(
            f"{saved.name}: checkpoint holds a {saved.field('kind')}, live is a {adapter.kind}"
        )
        return Changes()
    return adapter.prepare(saved, findings)


def _prepare_rng(
    plan: RestorePlan, loaded: Loaded, findings: Findings, path: str, rank: int
) -> None:
    if loaded.is_new(rank):
        findings.notes.append(f"rng (each rank had its own, rank {rank} was not there)")
    elif RNG in loaded.names(rank):
        plan._rng = prepare_rng(loaded.saved(RNG, path=path, rank=rank), findings)
    else:
        findings.missing.append("rng (random generators)")


def _report(findings: Findings, *, strict: bool, path: str) -> None:
    if findings.mismatches and strict:
        raise MismatchError(
            path,
            missing=findings.missing,
            unexpected=findings.unexpected,
            different=findings.different,
        )
    if findings.mismatches or findings.notes:
        logger.warning("%s: restoring what fits. %s", path, printable(_listing(findings)))
    if findings.overridden:
        logger.warning(
            "%s: hyper-parameters of the checkpoint replace the script's (assign them after "
            "restore() to change them): %s",
            path,
            printable("; ".join(findings.overridden)),
        )


def _listing(findings: Findings) -> str:
    parts = {
        "Missing in the checkpoint": findings.missing,
        "Not live": findings.unexpected,
        "Different": findings.different,
        "Left as they are": findings.notes,
    }
    return " ".join(f"{title}: {'; '.join(names)}." for title, names in parts.items() if names)


def materialise(
    loaded: Loaded, *, only: Iterable[str] | None = None, path: str, rank: int = 0
) -> dict[str, Any]:
    """State dicts by name, of owned CPU tensors; tied weights share one tensor.

    Tensors that were in shards are whole; what differs from rank to rank is as ``rank`` had it.
    Needs none of the training code. Raises ConfigError for an unknown name in ``only`` or an
    unknown rank.
    """
    require_rank(loaded, rank, path=path)
    there_are = loaded.names(rank) - {POSITIONS, GRADIENTS}
    names = [*(name for name in loaded.objects if name in there_are)]
    names += sorted(there_are.difference(names))
    chosen = {*names} if only is None else _choice("only", only, {*names})
    return {
        name: _read(loaded.saved(name, path=path, rank=rank)) for name in names if name in chosen
    }


def require_rank(loaded: Loaded, rank: int, *, path: str) -> None:
    """Raise ConfigError if there was no such rank."""
    if loaded.is_new(rank):
        there = ", ".join(map(str, sorted(loaded.own or {0})))
        raise ConfigError(f"{path} holds nothing of rank {rank}; expected one of {there}")


def _read(saved: Saved) -> Any:
    reader = _READERS.get(saved.field("kind"))
    if reader is None:
        raise saved.corrupt("kind of object", f"one of {', '.join(_READERS)}", saved.field("kind"))
    return reader(saved)


def positions(objects: Mapping[str, Json]) -> dict[str, dict[str, Any]]:
    """Iterators' positions by name."""
    return {name: decode_tree(node) for name, node in objects.get(POSITIONS, {}).items()}
