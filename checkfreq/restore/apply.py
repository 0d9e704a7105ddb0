"""Compares a checkpoint with the live objects, and loads it into them in place.

``prepare`` compares everything before anything changes, and lists every mismatch in one error. A
``RestorePlan`` then goes through four steps, in this order: ``fetch`` reads what needs memory of
its own; ``load`` runs what may raise, which is user code, and undoes it in reverse order if some of
it does; ``stream`` reads all other tensors into their places; ``finish`` sets what is left, and
cannot fail. Damage may be found until then: the live tensors hold parts of the checkpoint, and an
older one has to be loaded over them. Random generators and unused gradients are set last, by
``apply_last``, since a script may disturb them until its first batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from checkfreq.errors import (
    ConfigError,
    CorruptCheckpointError,
    MismatchError,
    StateError,
    StorageError,
    printable,
)
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.keeping import entries_by_object, put_live_values
from checkfreq.state.adapters.base import Changes, Fallible, Findings
from checkfreq.state.adapters.generic import tree_value
from checkfreq.state.adapters.module import module_state_dict
from checkfreq.state.adapters.optimizer_tree import optimizer_value
from checkfreq.state.adapters.rng import prepare_rng, rng_state
from checkfreq.state.adapters.scaler import scaler_state_dict
from checkfreq.state.capture import GRADIENTS, POSITIONS, RNG
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.gradients import prepare_gradients
from checkfreq.state.saved import SavedObject
from checkfreq.state.saved_tensor import Placement, Reader

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
    "optimizer": optimizer_value,
    "scaler": scaler_state_dict,
    "object": tree_value,
    "dict": tree_value,
    "list": tree_value,
    "rng": rng_state,
}


@dataclass(slots=True)
class RestorePlan:
    """The changes that restore the live objects, and the positions for the iterators."""

    positions: dict[str, dict[str, Any]]
    #: The positions of every rank that saved; ``positions`` are this rank's, or the first rank's
    #: if this one is new.
    all_positions: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    _reader: Reader | None = None
    _changes: list[Changes] = field(default_factory=list)
    _saved: list[SavedObject] = field(default_factory=list)
    _rng: Callable[[], None] | None = None
    _gradients: Callable[[], None] | None = None
    #: Optimizers with gradients to restore.
    with_gradients: frozenset[str] = frozenset()

    def apply(self) -> None:
        """All four steps; the caller sees to damage that is found on the way."""
        self.fetch()
        self.load()
        self.stream()
        self.finish()

    @property
    def new_bytes(self) -> int:
        """Memory on the host that is needed besides what the live objects have."""
        asked = sum(saved.asked_bytes for saved in self._saved)
        return asked + sum(changes.new_bytes for changes in self._changes)

    @property
    def filled(self) -> frozenset[str]:
        """Names of the tensors that ``stream`` writes to."""
        return frozenset(one.name for changes in self._changes for one in changes.filled)

    def fetch(self) -> None:
        """Read and verify what needs memory of its own; nothing live is changed."""
        self._read([one for saved in self._saved for one in saved.placements()])
        for saved in self._saved:
            saved.arrived()

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

    def stream(self) -> None:
        """Read and verify all other tensors, each into its place."""
        filled = [one for changes in self._changes for one in changes.filled]
        self._read([p for one in filled for p in one.saved.placements(one.tensor)])

    def finish(self) -> None:
        """Set everything else but generators and gradients. Cannot fail. Call it once."""
        for changes in self._changes:
            for set_all in changes.sets:
                set_all()
        self._changes.clear()
        for saved in self._saved:
            saved.forget()
        self._saved.clear()

    def _read(self, placements: list[Placement]) -> None:
        if placements:
            assert self._reader is not None
            self._reader.read(placements)

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
        # Something was read that was not asked for, or is not for user code.
        except (ConfigError, CorruptCheckpointError, StorageError):
            _put_all_back(changes[:done])
            raise
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
    loaded: FoundCheckpoint,
    *,
    only: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    keep: Iterable[str] = (),
    strict: bool = True,
    path: str,
    rank: int = 0,
    world: int = 1,
    resumes: bool = True,
    trusts: bool = False,
) -> RestorePlan:
    """Compare a checkpoint with the live objects of ``rank`` of ``world``, and change nothing.

    ``only`` and ``exclude`` choose tracked names, "rng", or names of iterators. ``keep`` names
    entries of optimizers and objects whose live values stand. ``resumes``: training goes on from
    it, so that flags of modules are restored too. ``trusts``: extra state goes to
    ``set_extra_state()`` whoever wrote it; from a killed run's memory, and from the mirror of a run
    that goes on, it does anyway. ``path`` is for messages.

    Raises MismatchError, which lists everything that does not fit (``strict=False``: one WARNING
    instead), ConfigError for unknown names, CorruptCheckpointError for state that makes no sense,
    StateError for shards that are in another node's directory.
    """
    positions = {r: decode_positions(loaded, r, path) for r in sorted(loaded.manifest.ranks or {0})}
    chosen = _chooser(chk, loaded, {n for own in positions.values() for n in own}, only, exclude)
    all_positions = {
        r: {name: value for name, value in own.items() if chosen(name)}
        for r, own in positions.items()
    }
    plan = RestorePlan(
        all_positions.get(rank, next(iter(all_positions.values()))),  # a new rank: the first one's
        all_positions,
        loaded.reader,
    )
    is_own = loaded.is_from_memory or (resumes and loaded.remote is not None)
    findings = Findings(resumes=resumes, strict=strict, trusts=trusts or is_own)
    kept = entries_by_object(chk, keep)
    for name in _names_to_restore(chk, loaded, rank, chosen, findings):
        saved = loaded.saved(name, path=path, rank=rank, declared=chk.per_rank)
        if name in kept:
            put_live_values(saved, chk.tracked[name], kept[name])
        plan._saved.append(saved)
        plan._changes.append(_prepare_object(chk, saved, findings))
    if chk.rng and chosen(RNG):
        _prepare_rng(plan, loaded, findings, path, rank)
    if (unused := loaded.saved_gradients(path=path, rank=rank)) is not None:
        plan._saved.append(unused)
        optimizers = {name: one for name, one in chk.optimizers.items() if chosen(name)}
        plan._gradients = prepare_gradients(optimizers, unused, findings, world=world)
        plan.with_gradients = frozenset(unused.field("parameters")) & optimizers.keys()
    _report(findings, strict=strict, path=path)
    return plan


def _names_to_restore(
    chk: CFCheckpoint,
    loaded: FoundCheckpoint,
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


def decode_positions(loaded: FoundCheckpoint, rank: int, path: str) -> dict[str, dict[str, Any]]:
    saved = SavedObject(POSITIONS, {}, path=path)
    return {name: saved.decode(node) for name, node in loaded.positions(rank).items()}


def _chooser(
    chk: CFCheckpoint,
    loaded: FoundCheckpoint,
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
    plan: RestorePlan, loaded: FoundCheckpoint, findings: Findings, path: str, rank: int
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
            "%s: the script gives other values than at the first start of the run, and those of "
            "the checkpoint stand: %s. To train on with the script's, write restore(keep=%s)",
            path,
            printable("; ".join(findings.overridden)),
            printable(repr(tuple(dict.fromkeys(findings.overridden.values())))),
        )
    if findings.flags:
        logger.warning(
            "%s: flags of modules in the checkpoint replace the script's, which has changed since "
            "the first start (set them after restore() to change them): %s",
            path,
            printable("; ".join(findings.flags)),
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
    loaded: FoundCheckpoint,
    *,
    only: Iterable[str] | None = None,
    without: Collection[str] = (),
    path: str,
    rank: int = 0,
    require_memory: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, Any]:
    """State dicts by name, with CPU tensors that own their memory; tied weights share one tensor.

    Sharded tensors come back whole, and state that differs between ranks as ``rank`` had it. Needs
    none of the training code. Names in ``without`` are left out. ``require_memory`` is told how
    many bytes are about to be read, and may raise. Raises ConfigError for an unknown name in
    ``only``, or an unknown rank.
    """
    require_rank(loaded, rank, path=path)
    chosen = [name for name in _names_to_read(loaded, only, rank) if name not in without]
    saved = [loaded.saved(name, path=path, rank=rank) for name in chosen]
    for one in saved:
        one.gives_parts = True
        for key in one.records:
            one.own(key)
    require_memory(sum(one.asked_bytes for one in saved))
    if placements := [p for one in saved for p in one.placements()]:
        loaded.reader.read(placements)
    for one in saved:
        one.arrived()
    return {one.name: _read(one) for one in saved}


def _names_to_read(loaded: FoundCheckpoint, only: Iterable[str] | None, rank: int) -> list[str]:
    present = loaded.names(rank) - {POSITIONS, GRADIENTS}
    names = [*(name for name in loaded.manifest.objects if name in present)]
    names += sorted(present.difference(names))
    chosen = {*names} if only is None else _choice("only", only, {*names})
    return [name for name in names if name in chosen]


def require_rank(loaded: FoundCheckpoint, rank: int, *, path: str) -> None:
    """Raise ConfigError if the checkpoint holds nothing of ``rank``."""
    if loaded.is_new(rank):
        there = ", ".join(map(str, sorted(loaded.manifest.ranks or {0})))
        raise ConfigError(f"{path} holds nothing of rank {rank}; expected one of {there}")


def _read(saved: SavedObject) -> Any:
    reader = _READERS.get(saved.field("kind"))
    if reader is None:
        raise saved.corrupt("kind of object", f"one of {', '.join(_READERS)}", saved.field("kind"))
    return reader(saved)
