"""Finds the newest checkpoint that validates, and reads it into memory.

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
from checkfreq.restore.file_reader import buffer_bytes, new_buffer, read_files
from checkfreq.restore.validation import validate_state
from checkfreq.state.capture import GRADIENTS, POSITIONS, covers
from checkfreq.state.saved import SavedObject, every_tensor, no_tensor
from checkfreq.store.manifest import MANIFEST_NAME, FileEntry, Manifest
from checkfreq.store.parts import file_name, file_of
from checkfreq.store.records import Records
from checkfreq.store.store import CheckpointStore, Rejected
from checkfreq.types import Json


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A verified checkpoint in memory, and what each rank finds in it.

    ``data``: by name, the bytes of each file that was read; of many ranks, each reads the files
    that it needs. ``rejected``: the newer steps that do not validate.
    """

    manifest: Manifest
    data: Mapping[str, memoryview]
    rejected: tuple[Rejected, ...] = ()

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
    """Reads the checkpoints of one directory, for one restore; never writes to it.

    ``before_reading`` is told how many bytes are about to be read, and may raise.
    ``may_arrive_in_part``: steps that were set aside are no sign that others are missing.
    """

    def __init__(
        self,
        chk_dir: Path,
        *,
        num_threads: int = 4,
        before_reading: Callable[[int], None] = lambda state_bytes: None,
        may_arrive_in_part: bool = False,
    ) -> None:
        self._store = CheckpointStore(chk_dir)
        self._may_arrive_in_part = may_arrive_in_part
        self._records = Records(self._store)
        self._num_threads = num_threads
        self._before_reading = before_reading
        self._validated: Manifest | None = None

    @property
    def path(self) -> Path:
        """The checkpoint directory."""
        return self._store.root

    def manifest(self, step: int) -> Manifest:
        """The step's manifest; CorruptCheckpointError if it is damaged or makes no sense."""
        manifest = self._records.manifest(step)
        if manifest is not self._validated:
            validate_state(manifest, path=str(self._store.path(step) / MANIFEST_NAME))
            self._validated = manifest
        return manifest

    def attempt(self, step: int) -> str:
        """The attempt that wrote the step; raises what ``manifest`` raises."""
        return self._records.attempt(step)

    def find(self, step: int | None) -> LoadedCheckpoint | None:
        """Read and verify ``step``, or the newest that validates; None if there never was one.

        Raises NoCheckpointError (no such step), CorruptCheckpointError (it, or all of them,
        fail validation), ConfigError (written by a newer format), StorageError.
        """
        with storage_errors(f"reading {self._store.root}"):
            return self._find(step)

    def _find(self, step: int | None) -> LoadedCheckpoint | None:
        if step is not None:
            self._store.require(step)
            return self._read(step)
        try:
            found, rejected = self._store.newest_valid(check=self._read)
        except NoCheckpointError:
            self._require_none_set_aside()
            return None
        return replace(found, rejected=rejected)

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
        return found is None or self.attempt(found.step) == found.manifest.attempt

    def _require_none_set_aside(self) -> None:
        """None is fine on a first run, but not if a crash came after all of them were set aside."""
        if self._store.holds_superseded() and not self._may_arrive_in_part:
            raise NoCheckpointError(
                f"{self._store.root} holds no checkpoint, but superseded/ does: move one back, or "
                "pass fresh=True"
            )

    def _read(self, step: int) -> LoadedCheckpoint:
        manifest = self.manifest(step)
        return LoadedCheckpoint(manifest, self.read(manifest, manifest.files))

    def read(self, manifest: Manifest, files: Sequence[FileEntry]) -> Mapping[str, memoryview]:
        """Read and verify some files of a step; CorruptCheckpointError if one is damaged."""
        # Sizes before memory: a manifest that was made up may claim files of any size.
        self._store.check_sizes(manifest.step, files)
        state_bytes = buffer_bytes(files)
        self._before_reading(state_bytes)
        return read_files(
            self._store,
            manifest.step,
            files,
            new_buffer(state_bytes),
            num_threads=self._num_threads,
        )

    # ---- many ranks

    def inventory(self) -> Json:
        """For the other ranks: the attempt of each step here, or what is wrong with its manifest.

        ``is_common``: whether there was ever a step that every directory of the run held.
        """
        attempts, damaged = {}, {}
        for step in self._store.steps():
            try:
                attempts[step] = self.attempt(step)
            except CorruptCheckpointError as error:
                damaged[step] = str(error)
        if not attempts and not damaged:
            self._require_none_set_aside()
        return {
            "attempts": attempts,
            "damaged": damaged,
            "ever_held": self._store.ever_held(),
            "is_common": self._store.ever_held_common(),
        }
