"""Compares a loaded checkpoint with the live objects, and loads it into them in place.

``prepare`` compares everything before anything changes, and lists every mismatch in one error.
``RestorePlan.apply`` then runs first what may raise, which is user code, and undoes it in reverse
order if some of it does; and after that what only copies and cannot fail. Random generators and
unused gradients are set last, by ``apply_last``, since a script may disturb them until its first
batch. Afterwards no live object refers to the buffers, and their memory can be reused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from checkfreq.errors import ConfigError, MismatchError, StateError, printable
from checkfreq.restore.restorer import LoadedCheckpoint
from checkfreq.state.adapters.base import Changes, Fallible, Findings
from checkfreq.state.adapters.generic import tree_value
from checkfreq.state.adapters.module import module_state_dict
from checkfreq.state.adapters.optimizer_tree import optimizer_state_dict
from checkfreq.state.adapters.rng import prepare_rng, rng_state
from checkfreq.state.adapters.scaler import scaler_state_dict
from checkfreq.state.capture import GRADIENTS, POSITIONS, RNG
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.gradients import prepare_gradients
from checkfreq.state.saved import SavedObject

logger = logging.getLogger(__name__)

__all__ = [
    "RestorePlan",
    "materialise",
    "prepare",
    "require_rank",
]

#: Keys of a checkpoint's objects that are not names of tracked objects.
_NOT_TRACKED = {RNG, POSITIONS, GRADIENTS}

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
    """The changes that restore the live objects, and the positions for the iterators."""

    positions: dict[str, dict[str, Any]]
    #: The positions of every rank that saved; ``positions`` are this rank's, or the first rank's
    #: if this one is new.
    all_positions: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    _changes: list[Changes] = field(default_factory=list)
    _saved: list[SavedObject] = field(default_factory=list)
    _rng: Callable[[], None] | None = None
    _gradients: Callable[[], None] | None = None

    def apply(self) -> None:
        """``load``, then ``copy``: for a single rank, which need not wait for others in between."""
        self.load()
        self.copy()

    def load(self) -> Callable[[], None]:
        """Restore what goes through user code, and return a function that undoes it. Call it once.

        Raises StateError, which names the object whose ``load_state_dict`` raised, after putting
        back what had been loaded before it.
        """
        fallible = [change for changes in self._changes for change in changes.fallible]
        loaded = [(change, _backup(change)) for change in fallible]
        _load_all(loaded)

        def undo() -> None:
            _put_all_back(loaded)

        return undo

    def copy(self) -> None:
        """Restore everything else but generators and gradients. Cannot fail. Call it once."""
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
        """Set generators and unused gradients. May be called again, before the first batch."""
        self.apply_rng()
        if self._gradients is not None:
            self._gradients()


def _backup(change: Fallible) -> Callable[[], None]:
    try:
        return change.backup()
    except Exception:  # user code; the undo is needed only if a later load fails
        logger.debug("the state of %s cannot be copied for an undo", change.name, exc_info=True)
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
    """Undo what was loaded, the latest first; returns the names that could not be undone."""
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
    except Exception:  # user code again; the error that the caller raises names the object
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
    """Compare a checkpoint with the live objects of ``rank`` of ``world``, and change nothing.

    ``only`` and ``exclude`` choose tracked names, "rng", or names of iterators. ``path`` is for
    messages. Raises MismatchError, which lists everything that does not fit (``strict=False``: one
    WARNING instead), ConfigError for unknown names, CorruptCheckpointError for state that makes no
    sense, StateError for shards that are in another node's directory.
    """
    positions = {
        r: _decode_positions(loaded, r, path) for r in sorted(loaded.manifest.ranks or {0})
    }
    chosen = _chooser(chk, loaded, {n for own in positions.values() for n in own}, only, exclude)
    all_positions = {
        r: {name: value for name, value in own.items() if chosen(name)}
        for r, own in positions.items()
    }
    plan = RestorePlan(
        all_positions.get(rank, next(iter(all_positions.values()))),  # a new rank: the first one's
        all_positions,
    )
    findings = Findings()
    for name in _names_to_restore(chk, loaded, rank, chosen, findings):
        saved = loaded.saved(name, path=path, rank=rank, declared=chk.per_rank)
        plan._saved.append(saved)
        plan._changes.append(_prepare_object(chk, saved, findings))
    if chk.rng and chosen(RNG):
        _prepare_rng(plan, loaded, findings, path, rank)
    if (unused := loaded.saved_gradients(path=path, rank=rank)) is not None:
        optimizers = {name: one for name, one in chk.optimizers.items() if chosen(name)}
        plan._gradients = prepare_gradients(optimizers, unused, findings, world=world)
    _report(findings, strict=strict, path=path)
    return plan


def _names_to_restore(
    chk: CFCheckpoint,
    loaded: LoadedCheckpoint,
    rank: int,
    chosen: Callable[[str], bool],
    findings: Findings,
) -> list[str]:
    """Tracked names for which ``rank`` finds an object; what only one side has is a finding."""
    names = loaded.names(rank) - _NOT_TRACKED
    elsewhere = {n for r in loaded.manifest.ranks for n in loaded.names(r)} - names - _NOT_TRACKED
    if loaded.is_new(rank):  # what is each rank's own now was not saved for a new one
        elsewhere |= names & chk.per_rank_objects
        names -= elsewhere
    findings.notes += [
        f"{name} (each rank had its own, rank {rank} had none)"
        for name in sorted(elsewhere & {*chk.tracked})
        if chosen(name)
    ]
    known = names | elsewhere
    findings.missing += [
        f"{n} (the whole object)" for n in chk.tracked if n not in known and chosen(n)
    ]
    findings.unexpected += [f"{n} (the whole object)" for n in known - {*chk.tracked} if chosen(n)]
    return [name for name in chk.tracked if name in names and chosen(name)]


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
    """State dicts by name, with CPU tensors that own their memory; tied weights share one tensor.

    Sharded tensors come back whole, and state that differs between ranks as ``rank`` had it. Needs
    none of the training code. Raises ConfigError for an unknown name in ``only``, or an unknown
    rank.
    """
    require_rank(loaded, rank, path=path)
    present = loaded.names(rank) - {POSITIONS, GRADIENTS}
    names = [*(name for name in loaded.manifest.objects if name in present)]
    names += sorted(present.difference(names))
    chosen = {*names} if only is None else _choice("only", only, {*names})
    return {
        name: _read(loaded.saved(name, path=path, rank=rank)) for name in names if name in chosen
    }


def require_rank(loaded: LoadedCheckpoint, rank: int, *, path: str) -> None:
    """Raise ConfigError if the checkpoint holds nothing of ``rank``."""
    if loaded.is_new(rank):
        there = ", ".join(map(str, sorted(loaded.manifest.ranks or {0})))
        raise ConfigError(f"{path} holds nothing of rank {rank}; expected one of {there}")


def _read(saved: SavedObject) -> Any:
    reader = _READERS.get(saved.field("kind"))
    if reader is None:
        raise saved.corrupt("kind of object", f"one of {', '.join(_READERS)}", saved.field("kind"))
    return reader(saved)
