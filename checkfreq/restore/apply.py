"""Putting a loaded checkpoint into live objects, in place, or refusing before anything changed.

``prepare`` compares everything and lists every mismatch in one error. ``RestorePlan.apply``
first runs what may raise (user code, undone in reverse order if any of it does), then what only
copies. Generators and gradients that wait for an update are set last, by ``apply_last``. Afterwards
nothing live refers to the buffers, which may be reused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from checkfreq.errors import ConfigError, MismatchError, StateError, printable
from checkfreq.restore.restorer import LoadedCheckpoint
from checkfreq.state.adapters.base import (
    Changes,
    Fallible,
    Findings,
)
from checkfreq.state.adapters.generic import tree_value
from checkfreq.state.adapters.module import module_state_dict
from checkfreq.state.adapters.optimizer_tree import optimizer_state_dict
from checkfreq.state.adapters.rng import prepare_rng, rng_state
from checkfreq.state.adapters.scaler import scaler_state_dict
from checkfreq.state.capture import GRADIENTS, POSITIONS, RNG
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.codec import decode_tree
from checkfreq.state.gradients import prepare_gradients
from checkfreq.state.saved import SavedObject
from checkfreq.types import Json

logger = logging.getLogger(__name__)

__all__ = [
    "RestorePlan",
    "materialise",
    "positions",
    "prepare",
    "require_rank",
]

#: Keys of a checkpoint's objects that are no tracked names.
_NO_OBJECTS = {RNG, POSITIONS, GRADIENTS}

_READERS: dict[str, Callable[[SavedObject], Any]] = {
    "module": module_state_dict,
    "optimizer": optimizer_state_dict,
    "scaler": scaler_state_dict,
    "object": tree_value,
    "dict": tree_value,
    "rng": rng_state,
}


@dataclass(slots=True)
class RestorePlan:
    """Changes that fit the live objects; ``positions`` are for the iterators to take."""

    positions: dict[str, dict[str, Any]]
    #: The same of every rank there was; ``positions`` are this rank's, of a new rank the first's.
    all_positions: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    _changes: list[Changes] = field(default_factory=list)
    _saved: list[SavedObject] = field(default_factory=list)
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
    loaded: LoadedCheckpoint,
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
    found = {r: _decode_positions(loaded, r, path) for r in sorted(loaded.manifest.ranks or {0})}
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
    elsewhere = {n for r in loaded.manifest.ranks for n in loaded.names(r)} - names - _NO_OBJECTS
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


def _decode_positions(loaded: LoadedCheckpoint, rank: int, path: str) -> dict[str, dict[str, Any]]:
    saved = SavedObject(POSITIONS, {}, path=path)
    return {name: saved.decode(node) for name, node in loaded.positions(rank).items()}


def _chooser(
    chk: CFCheckpoint,
    loaded: LoadedCheckpoint,
    found: Iterable[str],
    only: Iterable[str] | None,
    exclude: Iterable[str],
) -> Callable[[str], bool]:
    own = (name for rank in loaded.manifest.ranks for name in loaded.names(rank))
    known = {*chk.tracked, *loaded.manifest.objects, *own, *found, RNG} - {POSITIONS, GRADIENTS}
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


def _prepare_object(chk: CFCheckpoint, saved: SavedObject, findings: Findings) -> Changes:
    adapter = chk.adapters[saved.name]
    if saved.field("kind") != adapter.kind:
        findings.different.append(
            f"{saved.name}: checkpoint holds a {saved.field('kind')}, live is a {adapter.kind}"
        )
        return Changes()
    return adapter.prepare(saved, findings)


def _prepare_rng(
    plan: RestorePlan, loaded: LoadedCheckpoint, findings: Findings, path: str, rank: int
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
    loaded: LoadedCheckpoint, *, only: Iterable[str] | None = None, path: str, rank: int = 0
) -> dict[str, Any]:
    """State dicts by name, of owned CPU tensors; tied weights share one tensor.

    Tensors that were in shards are whole; what differs from rank to rank is as ``rank`` had it.
    Needs none of the training code. Raises ConfigError for an unknown name in ``only`` or an
    unknown rank.
    """
    require_rank(loaded, rank, path=path)
    there_are = loaded.names(rank) - {POSITIONS, GRADIENTS}
    names = [*(name for name in loaded.manifest.objects if name in there_are)]
    names += sorted(there_are.difference(names))
    chosen = {*names} if only is None else _choice("only", only, {*names})
    return {
        name: _read(loaded.saved(name, path=path, rank=rank)) for name in names if name in chosen
    }


def require_rank(loaded: LoadedCheckpoint, rank: int, *, path: str) -> None:
    """Raise ConfigError if there was no such rank."""
    if loaded.is_new(rank):
        there = ", ".join(map(str, sorted(loaded.manifest.ranks or {0})))
        raise ConfigError(f"{path} holds nothing of rank {rank}; expected one of {there}")


def _read(saved: SavedObject) -> Any:
    reader = _READERS.get(saved.field("kind"))
    if reader is None:
        raise saved.corrupt("kind of object", f"one of {', '.join(_READERS)}", saved.field("kind"))
    return reader(saved)


def positions(objects: Mapping[str, Json]) -> dict[str, dict[str, Any]]:
    """Iterators' positions by name."""
    return {name: decode_tree(node) for name, node in objects.get(POSITIONS, {}).items()}
