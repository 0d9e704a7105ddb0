"""Finds the newest checkpoint that validates and brings it back into the live objects.

Everything is read and every digest checked before a live byte changes. Corruption walks back
to an older checkpoint, with a report; another structure or a failing disk does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkfreq.errors import (
    CheckFreqError,
    CorruptCheckpointError,
    NoCheckpointError,
    storage_errors,
)
from checkfreq.restore.apply import Loaded, LoadedFile, RestorePlan, prepare
from checkfreq.restore.file_reader import Image, new_buffer, read_images, room_for
from checkfreq.restore.validation import require_sound
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.store.manifest import MANIFEST_NAME, FileEntry, Manifest
from checkfreq.store.records import Records
from checkfreq.store.store import CheckpointStore, Rejected
from checkfreq.types import Json


@dataclass(frozen=True, slots=True)
class Found:
    """A verified checkpoint in memory, and the newer ones that did not validate."""

    step: int
    manifest: Manifest
    images: Mapping[str, Image]
    rejected: tuple[Rejected, ...]

    @property
    def state_bytes(self) -> int:
        """Room that a snapshot of the same state needs."""
        return room_for(self.manifest.files)

    def loaded(self) -> Loaded:
        """What ``snapshot.apply`` works on; files that were not read are there to be compared."""
        images = {name: image.view for name, image in self.images.items()}
        files = {
            entry.name: LoadedFile(entry.tensors, images.get(entry.name))
            for entry in self.manifest.files
        }
        return Loaded(self.manifest.objects, files, self.manifest.ranks)


class Restorer:
    """Reads checkpoints of one directory, for one restore; never writes to it."""

    def __init__(
        self,
        chk_dir: Path,
        *,
        num_threads: int = 4,
        before_reading: Callable[[int], None] = lambda state_bytes: None,
    ) -> None:
        self._store = CheckpointStore(chk_dir)
        self._records = Records(self._store)
        self._num_threads = num_threads
        self._before_reading = before_reading
        self._sound: Manifest | None = None

    @property
    def path(self) -> Path:
        """The directory."""
        return self._store.root

    def manifest(self, step: int) -> Manifest:
        """The step's commit record; CorruptCheckpointError if it is damaged or makes no sense."""
        manifest = self._records.manifest(step)
        if manifest is not self._sound:
            require_sound(manifest, path=str(self._store.path(step) / MANIFEST_NAME))
            self._sound = manifest
        return manifest

    def attempt(self, step: int) -> str:
        """The attempt that it is of; raises the same."""
        return self._records.attempt(step)

    def find(self, step: int | None) -> Found | None:
        """Read and verify ``step``, or the newest that validates; None if there never was one.

        Raises NoCheckpointError (no such step), CorruptCheckpointError (it, or all of them,
        fail validation), ConfigError (written by a newer format), StorageError.
        """
        with storage_errors(f"reading {self._store.root}"):
            return self._find(step)

    def _find(self, step: int | None) -> Found | None:
        if step is not None:
            self._store.require(step)
            manifest, images = self._read(step)
            return Found(step, manifest, images, ())
        try:
            newest = self._store.newest_valid(check=self._read)
        except NoCheckpointError:
            self._require_none_set_aside()
            return None
        manifest, images = newest.value
        return Found(newest.step, manifest, images, newest.rejected)

    def find_while_opening(
        self, step: int | None, *, open_directory: Callable[[], None]
    ) -> Found | None:
        """``find`` while the worker starts and takes the lock; reading needs none.

        What the previous run's worker still committed, or removed, meanwhile makes us look again.
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
        del found  # its buffer
        return self.find(step)

    def _is_still_there(self, found: Found | None) -> bool:
        """False if another attempt took the step's place: a supersession was under way."""
        return found is None or self.attempt(found.step) == found.manifest.attempt

    def _require_none_set_aside(self) -> None:
        """No checkpoint is fine on a first run, but not when a crash left them all set aside."""
        if self._store.holds_superseded():
            raise NoCheckpointError(
                f"{self._store.root} holds no checkpoint, but superseded/ does: move one back, or "
                "pass fresh=True"
            )

    def _read(self, step: int) -> tuple[Manifest, Mapping[str, Image]]:
        manifest = self.manifest(step)
        return manifest, self.read(manifest, manifest.files)

    def read(self, manifest: Manifest, files: Sequence[FileEntry]) -> Mapping[str, Image]:
        """Read and verify some files of a step; CorruptCheckpointError if one is damaged."""
        # Before any memory is asked for: a record may say anything.
        self._store.check_sizes(manifest.step, files)
        state_bytes = room_for(files)
        self._before_reading(state_bytes)
        return read_images(
            self._store,
            manifest.step,
            files,
            new_buffer(state_bytes),
            num_threads=self._num_threads,
        )

    # ---- many ranks

    def holdings(self) -> Json:
        """What the directory holds: the attempt of each step, or what is wrong with its record.

        ``is_common``: there was a step that every directory of the run held.
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


def plan_restore(
    found: Found,
    chk: CFCheckpoint,
    *,
    path: Path,
    only: Collection[str] | None,
    exclude: Collection[str],
    strict: bool,
    rank: int = 0,
    world: int = 1,
) -> RestorePlan:
    """Compare a checkpoint with the live objects; raises MismatchError, changes nothing."""
    return prepare(
        chk,
        found.loaded(),
        only=only,
        exclude=exclude,
        strict=strict,
        path=str(path),
        rank=rank,
        world=world,
    )
