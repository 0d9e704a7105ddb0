"""Finds the newest checkpoint that validates, here or in the mirror, and reads it into memory.

Everything is read and every digest is checked before a live byte changes. A corrupt checkpoint is
walked past, with a report, to an older one. A checkpoint of a different structure, or a disk that
fails, is not corruption, and the error goes to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from checkfreq.errors import (
    CheckFreqError,
    CorruptCheckpointError,
    NoCheckpointError,
    storage_errors,
)
from checkfreq.restore.buffers import new_buffer
from checkfreq.restore.file_reader import buffer_bytes, read_files
from checkfreq.restore.progress import progress_of
from checkfreq.restore.validation import validate_state
from checkfreq.state.capture import GRADIENTS, POSITIONS, covers
from checkfreq.state.saved import SavedObject, every_tensor, no_tensor
from checkfreq.store.manifest import MANIFEST_NAME, FileEntry, Manifest
from checkfreq.store.parts import file_name, file_of
from checkfreq.store.records import Records, Summary
from checkfreq.store.source import CheckpointSource, Rejected, newest_valid, rejection
from checkfreq.store.store import CheckpointStore
from checkfreq.types import Json


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A verified checkpoint in memory, and what each rank finds in it.

    ``data``: by name, the bytes of each file that was read; of many ranks, each reads the files
    that it needs. ``rejected``: the newer steps that do not validate. ``remote``: where it was
    read from, if not from the directory.
    """

    manifest: Manifest
    data: Mapping[str, memoryview]
    rejected: tuple[Rejected, ...] = ()
    remote: CheckpointSource | None = None

    @property
    def step(self) -> int:
        """The step it was taken at."""
        return self.manifest.step

    @property
    def state_bytes(self) -> int:
        """Memory that a snapshot of the same state needs."""
        return buffer_bytes(self.manifest.files)

    def saved(
        self, name: str, *, path: str, rank: int = 0, declared: Collection[str] = ()
    ) -> SavedObject:
        """The saved state of one object, as ``rank`` sees it.

        A new rank sees the first rank's buffers, such as statistics of batch norms. It sees
        nothing of what is ``declared`` to be each rank's own, whether one rank wrote it or many.
        """
        own = self.manifest.ranks.get(rank, {}).get(name, {})
        json = own if "kind" in own else self.manifest.objects[name]

        def is_not_declared(key: str) -> bool:
            names = self._names_of(name, key)
            return not any(covers(prefix, name, one) for prefix in declared for one in names)

        files = {file.name: file for file in self.manifest.files}
        is_new = self.is_new(rank)
        shared = files.get(file_name(name))
        saved = SavedObject(
            name,
            json,
            path=path,
            tensors=() if shared is None else shared.tensors,
            data=self.data.get(file_name(name)),
            counts=is_not_declared if is_new else every_tensor,
        )
        first = self._first() if is_new else None
        for other, objects in sorted(self.manifest.ranks.items()):
            file = files.get(file_of(name, other))
            if file is not None:
                # Shards count whoever wrote them; other tensors are those of this rank alone.
                own_counts = every_tensor if other == rank else no_tensor
                saved.add_file(
                    file.tensors,
                    self.data.get(file.name),
                    shards=objects.get(name, {}).get("shards", {}),
                    counts=is_not_declared if other == first else own_counts,
                )
        return saved

    def saved_gradients(self, *, path: str, rank: int) -> SavedObject | None:
        """The gradients that no update has used on ``rank``; None if no rank had any.

        If only other ranks had some, they come without a parameter for this one.
        """
        ranks = [r for r in (rank, *self.manifest.ranks) if GRADIENTS in self.names(r)]
        if not ranks:
            return None
        found = self.saved(GRADIENTS, path=path, rank=ranks[0])
        if ranks[0] == rank:
            return found
        return SavedObject(GRADIENTS, {**found.json, "parameters": {}}, path=path)

    def _names_of(self, name: str, key: str) -> list[str]:
        """A tensor's key in an object, and the names that are tied to it."""
        owns = (own.get(name, {}) for own in self.manifest.ranks.values())
        ties = [json.get("aliases", {}) for json in (self.manifest.objects.get(name, {}), *owns)]
        return [key, *(tied for aliases in ties for tied, to in aliases.items() if to == key)]

    def names(self, rank: int) -> set[str]:
        """Names of the objects that ``rank`` finds, "rng" and "$positions" among them."""
        own = self.manifest.ranks.get(rank, {})
        return {*self.manifest.objects, *self._whole(rank), *({POSITIONS} & own.keys())}

    def is_new(self, rank: int) -> bool:
        """Whether nothing here is of such a rank: it did not exist, or it wrote elsewhere."""
        ranks = self.manifest.ranks
        if not ranks:
            return rank != 0
        return rank not in ranks or (not self._whole(rank) and any(map(self._whole, ranks)))

    def _whole(self, rank: int) -> list[str]:
        """Objects that a rank wrote by itself, more than shards or single tensors of them."""
        own = self.manifest.ranks.get(rank, {})
        return [name for name, json in own.items() if name != POSITIONS and "kind" in json]

    def _first(self) -> int | None:
        """The first rank of which there is more than positions."""
        ranks = self.manifest.ranks
        return next((rank for rank in sorted(ranks) if ranks[rank].keys() - {POSITIONS}), None)

    def positions(self, rank: int) -> Mapping[str, Json]:
        """JSON of the iterators' positions of one rank, by name."""
        ranks = self.manifest.ranks
        objects = ranks.get(rank, {}) if ranks else self.manifest.objects
        found: Mapping[str, Json] = objects.get(POSITIONS, {})
        return found


class Restorer:
    """Reads the checkpoints of one directory and its mirror, for one restore; never writes.

    ``remote``: the mirror, None without one. Where both hold a step, the directory's is read.
    ``chk_dir`` may itself be a mirror, of which there is no directory here.
    ``before_reading`` is told how many bytes are about to be read, and may raise.
    ``may_arrive_in_part``: steps that were set aside are no sign that others are missing.
    """

    def __init__(
        self,
        chk_dir: Path | CheckpointSource,
        *,
        remote: CheckpointSource | None = None,
        num_threads: int = 4,
        before_reading: Callable[[int], None] = lambda state_bytes: None,
        shows_progress: bool = True,
        may_arrive_in_part: bool = False,
    ) -> None:
        store = CheckpointStore(chk_dir) if isinstance(chk_dir, Path) else chk_dir
        self._store: CheckpointSource = store
        self.sources = (store,) if remote is None else (store, remote)
        self._records = {source: Records(source) for source in self.sources}
        self._may_arrive_in_part = may_arrive_in_part
        self._num_threads = num_threads
        self._before_reading = before_reading
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

    def find(self, step: int | None) -> LoadedCheckpoint | None:
        """Read and verify ``step``, or the newest that validates; None if there never was one.

        Raises NoCheckpointError (no such step), CorruptCheckpointError (it, or all of them,
        fail validation), ConfigError (written by a newer format), StorageError.
        """
        with storage_errors(f"reading {self.name}"):
            return self._find(step)

    def _find(self, step: int | None) -> LoadedCheckpoint | None:
        if step is not None:
            return self._find_step(step)
        try:
            found, rejected = newest_valid(self.sources, check=self._read)
        except NoCheckpointError:
            self._require_none_set_aside()
            return None
        return replace(found, rejected=rejected)

    def _find_step(self, step: int) -> LoadedCheckpoint:
        """``step`` from the directory; from the mirror if it is not there, or damaged."""
        rejected: list[Rejected] = []
        for source in self.sources:
            if step not in source.steps():
                continue
            try:
                return replace(self._read(source, step), rejected=tuple(rejected))
            except CorruptCheckpointError as error:
                rejected.append(rejection(source, step, error))
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
        self, step: int | None, *, open_directory: Callable[[], None]
    ) -> LoadedCheckpoint | None:
        """``find`` while the worker process starts and takes the lock: reading needs no lock.

        Until the lock is held, the worker of the run before may commit or remove steps. If the
        directory has changed by then, what was found may not be the newest, and is read again.
        """
        before = self._store.steps()
        try:
            found = self.find(step)
        except CheckFreqError:
            open_directory()
            return self.find(step)
        open_directory()
        if self._store.steps() == before and self._is_still_there(found):
            return found
        del found  # before the next read: memory for two checkpoints may not be there
        return self.find(step)

    def _is_still_there(self, found: LoadedCheckpoint | None) -> bool:
        """False if a different attempt has taken the step's place since it was read."""
        if found is None or found.remote is not None:
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

    def _read(self, source: CheckpointSource, step: int) -> LoadedCheckpoint:
        manifest = self.manifest(step, source)
        data = self.read(manifest, manifest.files, source)
        return LoadedCheckpoint(manifest, data, remote=None if source.is_local else source)

    def read(
        self, manifest: Manifest, files: Sequence[FileEntry], source: CheckpointSource | None = None
    ) -> Mapping[str, memoryview]:
        """Read and verify some files of a step; CorruptCheckpointError if one is damaged."""
        source = source or self._store
        # Sizes before memory: a manifest that was made up may claim files of any size.
        source.check_sizes(manifest.step, files)
        state_bytes = buffer_bytes(files)
        self._before_reading(state_bytes)
        total = sum(file.num_bytes for file in files)
        is_shown = self._shows_progress and not source.is_local
        with progress_of(f"restoring step {manifest.step}", total, is_shown=is_shown) as note:
            return read_files(
                source,
                manifest.step,
                files,
                new_buffer(state_bytes),
                num_threads=max(self._num_threads, source.num_requests),
                chunk_bytes=source.read_bytes,
                on_read=note,
            )

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
