"""Finds the newest checkpoint that validates, here or in the mirror, and has it loaded.

Its record is validated and the sizes of its files are checked here; its tensors are verified while
they are read into their places. A checkpoint in which damage is found at any stage is walked past,
with a report, to an older one. A checkpoint of a different structure, or a disk that fails, is not
corruption, and the error goes to the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from checkfreq.errors import (
    CheckFreqError,
    CorruptCheckpointError,
    MismatchError,
    NoCheckpointError,
    is_outage,
    storage_errors,
)
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.memory import HeldSnapshot, MemorySource
from checkfreq.restore.progress import progress_of
from checkfreq.restore.reading import StreamReader
from checkfreq.restore.shared_reads import SharedReads
from checkfreq.restore.validation import validate_state
from checkfreq.store.manifest import MANIFEST_NAME, FileEntry, Manifest
from checkfreq.store.records import Records, Summary
from checkfreq.store.source import CheckpointSource, Rejected, newest_valid, rejection
from checkfreq.store.store import CheckpointStore
from checkfreq.store.tree import Tree
from checkfreq.types import Json

T = TypeVar("T")

#: What is done with a checkpoint; CorruptCheckpointError has the next older one tried.
Use = Callable[[FoundCheckpoint], T]


#: A restore from a directory that takes longer says how far it is, in seconds.
_LONG_S = 5.0


class _Changed(Exception):
    """The directory changed between looking and having it for oneself."""


class _NotOpened(Exception):
    """The directory cannot be opened, which has nothing to do with the step that was read."""


class Restorer:
    """Reads the checkpoints of one directory and its mirror, for one restore; never writes.

    ``remote``: the mirror, None without one. Where both hold a step, the directory's is read.
    ``chk_dir`` may itself be a mirror, of which there is no directory here. ``held``: what a killed
    run left in memory of the directory's checkpoints; None: nothing is known of that.
    ``may_arrive_in_part``: steps that were set aside are no sign that others are missing.
    """

    def __init__(
        self,
        chk_dir: Path | CheckpointSource,
        *,
        remote: CheckpointSource | None = None,
        num_threads: int = 4,
        shows_progress: bool = True,
        may_arrive_in_part: bool = False,
        held: Sequence[HeldSnapshot] | None = None,
    ) -> None:
        store = CheckpointStore(chk_dir) if isinstance(chk_dir, Path) else chk_dir
        self._store: CheckpointSource = store
        memory = None if held is None else MemorySource(store, held)
        self.sources = tuple(one for one in (memory, store, remote) if one is not None)
        self._records = {source: Records(source) for source in self.sources}
        self._may_arrive_in_part = may_arrive_in_part
        self._num_threads = num_threads
        self._shows_progress = shows_progress
        self._validated: Manifest | None = None

    @property
    def name(self) -> str:
        """The checkpoint directory, and the mirror's URL if there is one."""
        return " and ".join(source.name for source in self.sources if not source.is_memory)

    def manifest(self, step: int, source: CheckpointSource | None = None) -> Manifest:
        """The step's manifest; CorruptCheckpointError if it is damaged or makes no sense."""
        source = source or self._store
        manifest = self._records[source].manifest(step)
        if manifest is not self._validated:
            validate_state(manifest, path=source.where(step, MANIFEST_NAME))
            self._validated = manifest
        return manifest

    def head(self, step: int, source: CheckpointSource) -> Manifest | Tree:
        """`manifest`, or the root of the records of many ranks, of which none is read yet."""
        root = self._records[source].head(step)
        return root if isinstance(root, Tree) else self.manifest(step, source)

    def summary(self, step: int) -> Summary:
        """The record of a step in the directory, in short; raises what ``manifest`` raises."""
        return self._records[self._store].summary(step)

    def find(self, step: int | None, use: Use[T]) -> tuple[FoundCheckpoint, T] | None:
        """Use ``step``, or the newest that validates; None if there never was one.

        Returns the checkpoint and what ``use`` returned. Raises NoCheckpointError (no such step),
        CorruptCheckpointError (it, or all of them, fail validation), ConfigError (written by a
        newer format), StorageError, and what ``use`` raises.
        """
        with storage_errors(f"reading {self.name}"):
            return self._find(step, use)

    def _find(self, step: int | None, use: Use[T]) -> tuple[FoundCheckpoint, T] | None:
        def check(source: CheckpointSource, step: int) -> tuple[FoundCheckpoint, T]:
            manifest = self.manifest(step, source)
            with self.reading(manifest, manifest.files, source) as found:
                try:
                    return found, use(found)
                except MismatchError as error:
                    if not source.is_memory:
                        raise
                    raise _does_not_fit(source.where(step), error) from error

        if step is not None:
            return self._find_step(step, check)
        try:
            (found, used), rejected = newest_valid(self.sources, check=check)
        except NoCheckpointError:
            self._require_none_set_aside()
            return None
        return replace(found, rejected=rejected), used

    def _find_step(
        self, step: int, check: Callable[[CheckpointSource, int], tuple[FoundCheckpoint, T]]
    ) -> tuple[FoundCheckpoint, T]:
        """``step`` from the directory; from the mirror if it is not there, or damaged."""
        rejected: list[Rejected] = []
        for source in self.sources:
            if step not in source.steps():
                continue
            try:
                found, used = check(source, step)
            except CorruptCheckpointError as error:
                rejected.append(rejection(source, step, error))
            except OSError as error:
                if not is_outage(error):
                    raise
                rejected.append(Rejected(step, error, is_here=False))
            else:
                return replace(found, rejected=tuple(rejected)), used
        if rejected:
            raise rejected[-1].error
        raise self._no_such(step)

    def _no_such(self, step: int) -> NoCheckpointError:
        try:
            self._store.require(step)
        except NoCheckpointError as error:
            others = (s for s in self.sources if s is not self._store and not s.is_memory)
            there = (f"{s.name} has: {_listed(s.steps())}" for s in others)
            return NoCheckpointError("; ".join([str(error), *there]))
        return NoCheckpointError(f"{self.name}: step {step} came only just now: try again")

    def find_while_opening(
        self,
        step: int | None,
        *,
        look: Use[T],
        change: Callable[[T], None],
        open_directory: Callable[[int], None],
        opens_first: bool,
    ) -> tuple[FoundCheckpoint, T] | None:
        """``find`` while the worker process starts and takes the lock: reading needs no lock.

        ``change`` gets what ``look`` returned: with ``opens_first`` once the directory is open,
        else before. Until it is open the worker of the run before may commit or remove steps. If
        the directory has changed, what was found may not be the newest: it is looked for again, and
        loaded over what was loaded already. ``open_directory`` is told which step was found, -1 if
        none was: what is newer may have yet to be written.
        """
        before = self._store.steps()
        is_open = False

        def open_if_unchanged(found: FoundCheckpoint) -> None:
            nonlocal is_open
            if is_open:
                return
            is_open = True
            try:
                open_directory(found.step)
            except OSError as error:
                raise _NotOpened from error
            if not self._is_still_newest(found, before, is_chosen=step is not None):
                raise _Changed

        def use(found: FoundCheckpoint) -> T:
            looked = look(found)
            if opens_first:
                open_if_unchanged(found)
            change(looked)
            open_if_unchanged(found)
            return looked

        try:
            found = self.find(step, use)
            if is_open:
                return found
        except _Changed:
            pass
        except _NotOpened as error:
            raise error.__cause__ or error from None
        except CheckFreqError:
            if is_open:
                raise
        if not is_open:
            is_open = True
            open_directory(-1)
        return self.find(step, use)

    def _is_still_newest(
        self, found: FoundCheckpoint, before: Sequence[int], *, is_chosen: bool
    ) -> bool:
        """Whether looking again would find the same."""
        if not found.is_from_memory:
            return self._store.steps() == before and self._is_still_there(found)
        # It may have been committed meanwhile, and is the same as before.
        is_newest = is_chosen or all(step <= found.step for step in self._store.steps())
        return is_newest and any(s.is_memory and s.holds(found.step) for s in self.sources)

    def _is_still_there(self, found: FoundCheckpoint) -> bool:
        """False if a different attempt has taken the step's place since it was read."""
        if found.remote is not None:
            return True
        return self.summary(found.step).attempt == found.manifest.attempt

    def _require_none_set_aside(self) -> None:
        """None is fine on a first run, but not if a crash came after all of them were set aside."""
        if self._may_arrive_in_part:
            return
        for source in self.sources:
            if source.holds_superseded():
                raise NoCheckpointError(
                    f"{source.name} holds no checkpoint, but superseded/ does: move one back, or "
                    "pass fresh=True"
                )

    @contextlib.contextmanager
    def reading(
        self,
        manifest: Manifest,
        files: Sequence[FileEntry],
        source: CheckpointSource | None = None,
        *,
        shared: SharedReads | None = None,
    ) -> Iterator[FoundCheckpoint]:
        """A step that can be read in the block, of which ``files`` are needed.

        ``shared``: what other ranks of this machine may read as well, in its stages.
        Raises CorruptCheckpointError if one is missing or has another size.
        """
        source = source or self._store
        # Sizes before memory: a manifest that was made up may claim tensors of any size.
        source.check_sizes(manifest.step, files)
        total = sum(file.num_bytes for file in files)
        after_s = _LONG_S if source.is_local else 0.0
        with progress_of(
            f"restoring step {manifest.step}",
            total,
            is_shown=self._shows_progress,
            after_s=after_s,
        ) as note:
            reader = StreamReader(
                source,
                manifest.step,
                num_threads=self._num_threads,
                on_read=note,
                shared=shared,
            )
            remote = None if source.is_local else source
            yield FoundCheckpoint(
                manifest,
                tuple(files),
                reader,
                remote=remote,
                is_from_memory=source.is_memory,
            )

    # ---- many ranks

    def inventory(self) -> Json:
        """For the other ranks, by source: what each step is, or what is wrong with its manifest.

        ``is_common``: whether there was ever a step that every directory of the run held. Memory
        is not among the sources (None): see `in_memory`.
        """
        found = [None if s.is_memory else self._inventory(s) for s in self.sources]
        if not any(said["attempts"] or said["damaged"] for said in found if said is not None):
            self._require_none_set_aside()
        return {
            "sources": found,
            "ever_held": any(source.ever_held() for source in self.sources),
            "is_common": any(
                isinstance(s, CheckpointStore) and s.ever_held_common() for s in self.sources
            ),
        }

    def in_memory(self) -> list[int]:
        """The steps of which a worker on this machine holds something."""
        return [step for source in self.sources if source.is_memory for step in source.steps()]

    def _inventory(self, source: CheckpointSource) -> Json:
        attempts, damaged = {}, {}
        for step in source.steps():
            try:
                is_here = source is self._store  # parsed already, most likely
                attempts[step] = self.summary(step).attempt if is_here else source.attempt(step)
            except CorruptCheckpointError as error:
                damaged[step] = str(error)
        return {"attempts": attempts, "damaged": damaged}


def _does_not_fit(where: str, error: MismatchError) -> CorruptCheckpointError:
    """Another structure in memory: the disk, which raises if it does not fit either."""
    return CorruptCheckpointError(
        where, check="structure", expected="that of the live objects", got=str(error)
    )


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
