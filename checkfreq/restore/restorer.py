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
    NoCheckpointError,
    storage_errors,
)
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.progress import progress_of
from checkfreq.restore.reading import StreamReader
from checkfreq.restore.validation import validate_state
from checkfreq.store.manifest import MANIFEST_NAME, FileEntry, Manifest
from checkfreq.store.records import Records, Summary
from checkfreq.store.source import CheckpointSource, Rejected, newest_valid, rejection
from checkfreq.store.store import CheckpointStore
from checkfreq.types import Json

T = TypeVar("T")

#: What is done with a checkpoint; CorruptCheckpointError has the next older one tried.
Use = Callable[[FoundCheckpoint], T]


#: A restore from a directory that takes longer says how far it is, in seconds.
_LONG_S = 5.0


class _Changed(Exception):
    """The directory changed between looking and having it for oneself."""


class Restorer:
    """Reads the checkpoints of one directory and its mirror, for one restore; never writes.

    ``remote``: the mirror, None without one. Where both hold a step, the directory's is read.
    ``chk_dir`` may itself be a mirror, of which there is no directory here.
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
    ) -> None:
        store = CheckpointStore(chk_dir) if isinstance(chk_dir, Path) else chk_dir
        self._store: CheckpointSource = store
        self.sources = (store,) if remote is None else (store, remote)
        self._records = {source: Records(source) for source in self.sources}
        self._may_arrive_in_part = may_arrive_in_part
        self._num_threads = num_threads
        self._shows_progress = shows_progress
        self._validated: Manifest | None = None

    @property
    def name(self) -> str:
        """The checkpoint directory, and the mirror's URL if there is one."""
        return " and ".join(source.name for source in self.sources)

    def manifest(self, step: int, source: CheckpointSource | None = None) -> Manifest:
        """The step's manifest; CorruptCheckpointError if it is damaged or makes no sense."""
        source = source or self._store
        manifest = self._records[source].manifest(step)
        if manifest is not self._validated:
            validate_state(manifest, path=source.where(step, MANIFEST_NAME))
            self._validated = manifest
        return manifest

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
                return found, use(found)

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
            else:
                return replace(found, rejected=tuple(rejected)), used
        if rejected:
            raise rejected[-1].error
        raise self._no_such(step)

    def _no_such(self, step: int) -> NoCheckpointError:
        try:
            self._store.require(step)
        except NoCheckpointError as error:
            there = (f"{s.name} has: {_listed(s.steps())}" for s in self.sources[1:])
            return NoCheckpointError("; ".join([str(error), *there]))
        return NoCheckpointError(f"{self.name}: step {step} came only just now: try again")

    def find_while_opening(
        self,
        step: int | None,
        *,
        look: Use[T],
        change: Callable[[T], None],
        open_directory: Callable[[], None],
    ) -> tuple[FoundCheckpoint, T] | None:
        """``find`` while the worker process starts and takes the lock: looking needs no lock.

        ``change`` gets what ``look`` returned, once the directory is open. Until then the worker of
        the run before may commit or remove steps. If the directory has changed, what was found may
        not be the newest, and is looked for again before anything is changed.
        """
        before = self._store.steps()
        is_open = False

        def use(found: FoundCheckpoint) -> T:
            nonlocal is_open
            looked = look(found)
            if not is_open:
                is_open = True
                open_directory()
                if self._store.steps() != before or not self._is_still_there(found):
                    raise _Changed
            change(looked)
            return looked

        try:
            found = self.find(step, use)
            if is_open:
                return found
        except _Changed:
            pass
        except CheckFreqError:
            if is_open:
                raise
        if not is_open:
            is_open = True
            open_directory()
        return self.find(step, use)

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
        self, manifest: Manifest, files: Sequence[FileEntry], source: CheckpointSource | None = None
    ) -> Iterator[FoundCheckpoint]:
        """A step that can be read in the block, of which ``files`` are needed.

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
                source, manifest.step, num_threads=self._num_threads, on_read=note
            )
            remote = None if source.is_local else source
            yield FoundCheckpoint(manifest, tuple(files), reader, remote=remote)

    # ---- many ranks

    def inventory(self) -> Json:
        """For the other ranks, by source: what each step is, or what is wrong with its manifest.

        ``is_common``: whether there was ever a step that every directory of the run held.
        """
        found = [self._inventory(source) for source in self.sources]
        if not any(said["attempts"] or said["damaged"] for said in found):
            self._require_none_set_aside()
        return {
            "sources": found,
            "ever_held": any(source.ever_held() for source in self.sources),
            "is_common": any(
                isinstance(s, CheckpointStore) and s.ever_held_common() for s in self.sources
            ),
        }

    def _inventory(self, source: CheckpointSource) -> Json:
        attempts, damaged = {}, {}
        for step in source.steps():
            try:
                is_here = source is self._store  # parsed already, most likely
                attempts[step] = self.summary(step).attempt if is_here else source.attempt(step)
            except CorruptCheckpointError as error:
                damaged[step] = str(error)
        return {"attempts": attempts, "damaged": damaged}


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
