"""The checkpoints of one directory: begin, commit, list, walk back, quarantine, prune.

A directory named ``step-<n>`` is complete and is never modified. It appears atomically, by the
rename in `CheckpointStore.commit`, after everything in it is durable. So a crash at any instant
leaves the old set of checkpoints, or the old set plus one::

    .tmp-<step>-<attempt>/ ->  step-<step>/  ->  superseded/, quarantine/, or .trash-<step>/

Where the file system cannot rename a directory (one of a lower layer of overlayfs), the file
``.gone-<step>`` takes the place of the rename: while it exists, the step does not count as a
checkpoint, whatever is left of its directory.

Readers (`steps`, `manifest`, `verify`, `newest_valid`, ...) take no lock, change nothing, and
trust nothing that fails validation; a symbolic link named like a step is not a checkpoint. The
other methods are for the one process that holds the directory's lock, one call at a time; only a
payload's `pwrite` may be called by many threads.

Errors of the file system are raised as OSError and never taken for corruption, with three
exceptions: a file missing from a committed directory, one that is not a regular file, and one
that is far too large.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from checkfreq import faults
from checkfreq.errors import (
    CheckFreqError,
    CorruptCheckpointError,
    ForeignEntryError,
    NoCheckpointError,
    PersistError,
    StorageError,
)
from checkfreq.store.fileops import FileOps, Kind, LocalFileOps, PayloadFile, ReadFile
from checkfreq.store.manifest import (
    MANIFEST_NAME,
    STATE_BYTES,
    FileEntry,
    Manifest,
    most_bytes,
)
from checkfreq.store.marks import MARKS_MAX_BYTES, StepMark, line_of, mark_line, read_marks
from checkfreq.store.parts import part_name
from checkfreq.store.places import folder_of, is_folder, place_of
from checkfreq.store.source import CheckpointSource, Rejected, newest_valid
from checkfreq.store.tree import Tree
from checkfreq.store.verify import SizedFile, expect_size, header_bytes
from checkfreq.types import round_up_to_page

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-([0-9]{8,18})")
_PENDING = re.compile(r"\.tmp-([0-9]{1,18})-([A-Za-z0-9_-]{1,64})")
_PAYLOAD = ".safetensors"
_STALE = (".tmp-", ".trash-")
#: How the names begin that say which steps there are: a directory may hold a million others.
_OF_STEPS = ("step-", ".gone-")
_GONE = re.compile(r"\.gone-([0-9]{1,18})")
_COPY_BYTES = 8 << 20
#: The file that `note_common` writes: a step that was committed in every directory of the run.
_COMMON = "common"
_MARKS = "marks.jsonl"
_LONG_MARKS_BYTES = 16 << 10


T = TypeVar("T")


@dataclass(slots=True)
class Pending:
    """A checkpoint being written, in a directory that readers ignore.

    ``is_shared``: other ranks write into it too, and a killed worker may have left files in it.
    ``has_folders``: files of ranks lie where `places` says.
    """

    step: int
    attempt: str
    path: Path
    _ops: FileOps
    is_shared: bool = False
    has_folders: bool = False
    _open: list[PayloadFile] = field(default_factory=list)
    _created: list[Path] = field(default_factory=list)

    def create_payload(self, name: str, num_bytes: int) -> PayloadFile:
        """Create a payload file of about ``num_bytes``. OSError when the disk is full."""
        path = self.make_way(name)
        if self.is_shared and self._ops.exists(path):
            self._ops.unlink(path)
        file = self._ops.create_payload(path, num_bytes=num_bytes)
        self._open.append(file)
        self._created.append(path)
        return file

    def path_of(self, name: str) -> Path:
        """Where a file of the checkpoint is, or will be."""
        return self.path / (place_of(name) if self.has_folders else name)

    def sizes(self, ranks: Iterable[int]) -> Mapping[str, int]:
        """Lengths in bytes of the files of these ranks, and of those of no rank, by name.

        From one listing of each folder. A folder that is missing has none.
        """
        found: dict[str, int] = {}
        for folder in sorted({"", *map(self.folder_of, ranks)}):
            with contextlib.suppress(FileNotFoundError):
                found |= self._ops.sizes(self.path / folder)
        return found

    def folder_of(self, rank: int) -> str:
        """The folder of a rank's files; empty for the checkpoint's directory."""
        return folder_of(rank) if self.has_folders else ""

    def make_way(self, name: str) -> Path:
        """`path_of` a file that is about to be written: its folder is made."""
        path = self.path_of(name)
        if path.parent != self.path:
            with contextlib.suppress(FileExistsError):
                self._ops.mkdir(path.parent)
        return path

    def link_payload(self, source: Path, entry: FileEntry) -> bool:
        """Have ``source``, a payload of a committed step, under the name in ``entry`` as well.

        Its contents are durable; its name here is so once this directory is synced, as is that of
        any payload. False where it is not to be had so: it is gone, or not as large as its entry
        says, or the file system refuses (EMLINK, EPERM, EXDEV): then it has to be written.
        """
        path = self.make_way(entry.name)
        try:
            faults.reach("commit.link")
            self._ops.link(source, path)
        except OSError as error:
            logger.info("%s is not linked to %s: %s", path, source, error)
            return False
        self._created.append(path)
        if self._ops.file_size(path) == entry.num_bytes:
            return True
        self._ops.unlink(path)
        self._created.remove(path)
        return False

    def finish_payload(self, file: PayloadFile, num_bytes: int) -> None:
        """Cut off the padding of the last page, make the file durable and close it."""
        faults.reach("commit.truncate")
        file.truncate(num_bytes)
        faults.reach("commit.sync_payload")
        file.datasync()
        file.close()
        self._open.remove(file)

    def close(self) -> None:
        """Close unfinished payloads; no thread may still be writing to them."""
        while self._open:
            self._open.pop().close()

    def disown_created(self) -> None:
        """Leave the payload files created here alone from now on: the leader may commit them."""
        self._created.clear()

    def remove_created(self) -> None:
        """Remove the payload files created here, and nothing that others wrote."""
        self.close()
        for path in self._created:
            with contextlib.suppress(FileNotFoundError):
                self._ops.unlink(path)


@dataclass(frozen=True, slots=True)
class CommitResult:
    """Where the step is, and whether an existing checkpoint was kept instead of the new one."""

    path: Path
    kept_existing: bool


class CheckpointStore(CheckpointSource):
    """The checkpoints under ``root``."""

    def __init__(self, root: Path, *, ops: FileOps | None = None) -> None:
        self.root = root.absolute()  # a later chdir must not move it
        self.ops: FileOps = LocalFileOps(self.root) if ops is None else ops
        self._links_logged: set[int] = set()
        #: Above this size the file of marks is rewritten, without removed steps.
        self._long_marks_bytes = _LONG_MARKS_BYTES

    # Writing: for the holder of the lock.

    def open(self, *, keep_pending: bool = False) -> None:
        """Make the directory, and remove what interrupted commits and prunes left in it.

        ``keep_pending``: keep unfinished checkpoints, since other ranks may be writing parts.
        What cannot be removed is left (a member's worker of an earlier run may still write to it).
        """
        self.make()
        names = self.ops.listdir(self.root)
        for name in names:
            is_kept = keep_pending and pending_of(name) is not None
            if name.startswith(_STALE) and not is_kept:
                self._try_to_remove(name, until="the next start")
        for step in sorted(_gone_among(names)):
            self._try_to_bury(step)

    def make(self) -> None:
        """Make the directory and its missing parents, and their entries durable."""
        if not self.ops.is_dir(self.root):
            self._make_durable_dir(self.root)
            return
        try:
            self.ops.sync_dir(self.root.parent)  # whoever made it may not have synced its entry
        except OSError as error:  # the parent may have search permission only
            logger.info("%s is not synced: %s", self.root.parent, error)

    def begin(self, step: int, *, attempt: str, num_bytes: int = 0) -> Pending:
        """Start writing a checkpoint; OSError (ENOSPC) if ``num_bytes`` cannot fit."""
        self._require_room(step, num_bytes)
        faults.reach("commit.mkdir")
        path = self._pending_path(step, attempt)
        self.ops.mkdir(path)
        return Pending(step, attempt, path, self.ops)

    def commit(
        self,
        pending: Pending,
        manifest: Manifest | Tree,
        *,
        supersede_after: int | None = None,
        keep_existing: bool = True,
    ) -> CommitResult:
        """Turn a pending checkpoint, its payloads finished, into the checkpoint of its step.

        ``supersede_after``: first move every later step to ``superseded/`` (-1: all steps).

        If the step already exists and is not superseded: one that validates is kept, and
        ``pending`` is dropped (without ``keep_existing`` the old one is superseded instead); one
        that does not validate is quarantined.

        On return the checkpoint survives a power cut. After an error, call `abort`: the earlier
        checkpoints are as they were, and the new one is among them only if the very last sync
        failed. Raises OSError, and PersistError if payloads and manifest disagree.
        """
        self._check_payloads(pending, manifest)
        if self.ops.exists(self._tombstone(pending.step)):
            self._bury(pending.step)  # else the file would hide the new checkpoint as well
        superseded = self._steps_after(supersede_after)
        if pending.step not in superseded and self._holds_valid(pending.step):
            if keep_existing:
                self.abort(pending)
                self.ops.sync_dir(self.root)  # its rename may never have been synced
                return CommitResult(self.path(pending.step), kept_existing=True)
            superseded = [pending.step, *superseded]
        self._write_record(pending.path, manifest)
        self._enter_set(pending, superseded)
        faults.reach("commit.sync_parent")
        self.ops.sync_dir(self.root)
        self._after_commit(pending.step, superseded)
        return CommitResult(self.path(pending.step), kept_existing=False)

    def abort(self, pending: Pending) -> None:
        """Remove a pending checkpoint; what cannot be removed now, the next `open` removes."""
        pending.close()
        if not self.ops.exists(pending.path):
            return
        self._try_to_remove(pending.path.name, until="the next start")

    def quarantine(self, step: int, reason: str) -> Path:
        """Move a step to ``quarantine/``, beside a text file with the reason; its new path."""
        target = self._set_aside(step, "quarantine")
        self._sync_moves("quarantine")
        note = target.with_name(f"{target.name}.reason.txt")
        self.ops.replace_file(note, f"{reason}\n".encode(errors="backslashreplace"))
        return target

    def prune(self, steps: Iterable[int]) -> list[int]:
        """Remove steps; returns the removed ones, ascending.

        If none of the other steps looks valid, keeps the newest of ``steps`` that does.
        """
        present = self.steps()
        doomed = sorted(set(steps).intersection(present))
        if doomed and self._newest_intact(set(present).difference(doomed)) is None:
            last = self._newest_intact(doomed)
            doomed = [step for step in doomed if step != last]
        moved = [self._move_to_trash(step) for step in doomed]
        trash = [path for path in moved if path is not None]
        if trash:
            # Before any file is removed: otherwise a power cut could undo the rename but not the
            # removals, and leave a directory with a step's name and half of its files.
            faults.reach("prune.sync")
            self.ops.sync_dir(self.root)
        for path in trash:
            faults.reach("prune.remove")
            self._remove(path)
        self._forget_marks_of_others(set(present).difference(doomed))
        return doomed

    def add_mark(
        self,
        step: int,
        *,
        keep: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        finished: bool | None = None,
        at_epoch_end: bool = False,
    ) -> None:
        """Pin or unpin a step (None: neither), and add metrics to it; durable on return.

        ``finished``: whether the run is finished with this step. ``at_epoch_end``: an epoch ended
        with it.
        """
        self._append_mark(
            mark_line(
                step, keep=keep, metrics=metrics, finished=finished, at_epoch_end=at_epoch_end
            )
        )

    def note_common(self, step: int) -> None:
        """Record that a step was committed in every directory of a run; durable on return.

        Until then, steps that only some directories hold do not count as checkpoints of the run.
        """
        self.ops.replace_file(self.root / _COMMON, f"{step}\n".encode())
        self.ops.sync_dir(self.root)

    # Reading: for anyone.

    def ever_held_common(self) -> bool:
        """Whether there was ever a step that every directory of the run held."""
        return self.ops.exists(self.root / _COMMON)

    @property
    def name(self) -> str:
        """The directory."""
        return str(self.root)

    def where(self, step: int, file: str = "") -> str:
        """See CheckpointSource."""
        return str(self.locate(step, file) if file else self.path(step))

    def holds(self, step: int) -> bool:
        """See CheckpointSource."""
        return self.ops.exists(self.path(step))

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is, or would be."""
        return self.root / f"step-{step:08d}"

    def locate(self, step: int, file: str) -> Path:
        """Where a file of a step is, or would be."""
        place, folder = place_of(file), self.path(step)
        is_beside = place != file and self.ops.exists(folder / file)  # of ranks that have no tree
        return folder / (file if is_beside else place)

    def steps(self) -> list[int]:
        """Committed steps, ascending; empty if the directory does not exist."""
        kinds = self._kinds(self.root, beginning=_OF_STEPS)
        gone = _gone_among(kinds)
        found = {step_of(name) for name, kind in kinds.items() if kind is not Kind.LINK}
        return sorted(step for step in found if step is not None and step not in gone)

    def links(self) -> list[int]:
        """Steps whose directory name is a symbolic link, ascending; they are not checkpoints."""
        kinds = self._kinds(self.root, beginning=_OF_STEPS)
        found = {step_of(name) for name, kind in kinds.items() if kind is Kind.LINK}
        return sorted(step for step in found if step is not None)

    def log_links(self) -> None:
        """See CheckpointSource."""
        for step in set(self.links()) - self._links_logged:
            self._links_logged.add(step)
            logger.warning(
                "%s is a symbolic link, not a checkpoint: its target is neither read nor changed. "
                "Pass the directory that holds the target as the path, or move the target here",
                self.path(step),
            )

    def holds_superseded(self) -> bool:
        """Whether any step was set aside in favour of a later commit, after a run went back."""
        return bool(self._kinds(self.root / "superseded"))

    def ever_held(self) -> bool:
        """Whether there is a checkpoint, or was one that had to be quarantined."""
        names = self._kinds(self.root / "quarantine")
        return bool(self.steps()) or any(name.startswith("step-") for name in names)

    def record(self, step: int) -> bytes:
        """The bytes of the step's commit record, not validated: see `parse`.

        Raises NoCheckpointError, CorruptCheckpointError (the record is missing), OSError.
        """
        path = self.path(step) / MANIFEST_NAME
        return self._of_committed(step, path, partial(self._read_record, path))

    def rank_record(self, step: int, rank: int) -> bytes:
        """See CheckpointSource."""
        path = self.locate(step, part_name(rank))
        return self._of_committed(step, path, partial(self._read_record, path))

    def check_sizes(self, step: int, files: Iterable[SizedFile]) -> None:
        """CorruptCheckpointError for a file that is missing or differs in size from its entry."""
        for entry in files:
            path = self.locate(step, entry.name)
            size = self._of_committed(step, path, partial(self.ops.file_size, path))
            expect_size(str(path), entry, size)

    def open_payload(self, step: int, entry: FileEntry) -> ReadFile:
        """Open a payload file of a step; CorruptCheckpointError if missing or of the wrong size."""
        path = self.locate(step, entry.name)
        file = self._of_committed(step, path, lambda: self.ops.open_for_read(path))
        try:
            expect_size(str(path), entry, file.size)
        except CorruptCheckpointError:
            file.close()
            raise
        return file

    def newest_valid(self, *, check: Callable[[int], T]) -> tuple[T, tuple[Rejected, ...]]:
        """Walk back from the newest step to the first for which ``check`` returns.

        Returns what ``check`` returned, and the newer steps that it rejected, newest first.
        ``check`` is `verify`, or any function that raises CorruptCheckpointError for a step to
        be walked past; any other error is raised to the caller. Steps that another process
        prunes meanwhile are ignored. Raises NoCheckpointError if the directory never held a
        checkpoint, CorruptCheckpointError if it did and none validates.
        """
        return newest_valid((self,), check=lambda _, step: check(step))

    def marks(self) -> dict[int, StepMark]:
        """The marks of each step; lines torn by a crash are skipped."""
        return read_marks(self._marks_bytes(), path=self.root / _MARKS)

    # The pieces of a commit.

    def _pending_path(self, step: int, attempt: str) -> Path:
        return self.root / f".tmp-{step}-{attempt}"

    def _require_room(self, step: int, num_bytes: int) -> None:
        free_bytes = self.ops.free_bytes(self.root)
        if num_bytes > free_bytes:
            text = f"{os.strerror(errno.ENOSPC)}: step {step} needs {num_bytes} bytes"
            raise OSError(errno.ENOSPC, f"{text}, {free_bytes} are free", str(self.root))

    def _check_payloads(self, pending: Pending, manifest: Manifest | Tree) -> None:
        """PersistError unless the manifest describes the pending files."""
        wrong = []
        if (manifest.step, manifest.attempt) != (pending.step, pending.attempt):
            wrong.append(f"the manifest is of step {manifest.step}, attempt {manifest.attempt}")
        sizes = pending.sizes(manifest.leaves) if isinstance(manifest, Tree) else {}
        for entry in manifest.files:
            size = sizes.get(entry.name)
            if size is None:
                size = self.ops.file_size(pending.path_of(entry.name))
            if size != entry.num_bytes:
                wrong.append(f"{entry.name} has {size} bytes, its entry says {entry.num_bytes}")
        if wrong:
            text = f"step {pending.step} was not committed: {'; '.join(wrong)}"
            raise PersistError(text, step=pending.step, phase="commit")

    def _steps_after(self, step: int | None) -> list[int]:
        return [] if step is None else [later for later in self.steps() if later > step]

    def _holds_valid(self, step: int) -> bool:
        if not self.ops.exists(self.path(step)):
            return False
        try:
            self.verify(step)
        except CorruptCheckpointError as error:
            self.quarantine(step, f"found when step {step} was committed again: {error}")
            return False
        return True

    def _write_record(self, directory: Path, manifest: Manifest | Tree) -> None:
        """After the payloads' sync: a valid manifest must imply valid payloads."""
        path = directory / MANIFEST_NAME
        data = manifest.encode()
        self._require_readable(manifest, len(data), directory)
        faults.reach("commit.write_manifest")
        self.ops.write_file(path, data)
        faults.reach("commit.sync_manifest")
        self.ops.sync_file(path)
        folders = [*(directory / name for name in self._folders_in(directory)), directory]
        if isinstance(manifest, Tree) or manifest.ranks:
            self._remove_parts(folders, manifest)
        faults.reach("commit.sync_temp_dir")
        for folder in folders:
            self.ops.sync_dir(folder)

    def _folders_in(self, directory: Path) -> list[str]:
        """The folders for files of ranks in a checkpoint's directory."""
        kinds = self.ops.scan(directory)
        return [n for n, kind in kinds.items() if kind is Kind.DIRECTORY and is_folder(n)]

    def _require_readable(self, manifest: Manifest | Tree, num_bytes: int, directory: Path) -> None:
        if num_bytes > STATE_BYTES and num_bytes > (most := self._most_record_bytes(directory)):
            text = (
                f"step {manifest.step} was not committed: its non-tensor state makes its manifest "
                f"{num_bytes} bytes long, and at most {most} are read back. Keep long lists of "
                "numbers as tensors or NumPy arrays"
            )
            raise PersistError(text, step=manifest.step, phase="commit")

    def _remove_parts(self, folders: Iterable[Path], manifest: Manifest | Tree) -> None:
        """Remove the merged parts, and what killed workers left beside them.

        After the manifest is written, so that a worker that takes over finds either all parts or
        the complete record. A `Tree` keeps its parts, and which payloads they name is not known.
        """
        held = {MANIFEST_NAME, *(file.name for file in manifest.files)}
        for folder in folders:
            for name in self.ops.listdir(folder):
                is_payload = isinstance(manifest, Tree) and name.endswith(_PAYLOAD)
                if not (name in held or is_payload or is_folder(name)):
                    self.ops.unlink(folder / name)

    def _enter_set(self, pending: Pending, superseded: Sequence[int]) -> None:
        faults.reach("commit.supersede")
        moved: list[tuple[int, Path]] = []
        try:
            for step in superseded:
                target = self._set_aside(step, "superseded")
                moved.append((step, target))
            if moved:
                self._sync_moves("superseded")
            faults.reach("commit.rename")
            self.ops.rename(pending.path, self.path(pending.step))
        except OSError:
            self._bring_back(moved)
            raise

    def _bring_back(self, moved: Sequence[tuple[int, Path]]) -> None:
        """Undo a supersession whose commit failed: the set of checkpoints stays as it was."""
        try:
            for step, path in reversed(moved):
                self.ops.rename(path, self.path(step))
            if moved:
                self._sync_moves("superseded")
        except OSError as error:
            logger.error("later steps may have stayed in superseded/: %s", error)

    def _after_commit(self, step: int, superseded: Sequence[int]) -> None:
        """Update the pointer and the marks; a failure is only logged: the step is durable."""
        try:
            faults.reach("commit.pointer")
            self.ops.replace_file(self.root / "latest", f"{self.path(step).name}\n".encode())
            # Marks of these numbers were for the checkpoints that had them before.
            for old in self._marked({step, *superseded}):
                self._append_mark(mark_line(old, reset=True))
        except (CheckFreqError, OSError) as error:
            logger.warning("step %d is committed, but its pointer is not updated: %s", step, error)

    # Moves and directories.

    def _set_aside(self, step: int, folder: str) -> Path:
        """Move a step into a folder; durable only after `_sync_moves`."""
        self._make_durable_dir(self.root / folder)
        target = self._free_name(self.root / folder / self.path(step).name)
        try:
            self.ops.rename(self.path(step), target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._copy_aside(step, target)
        return target

    def _copy_aside(self, step: int, target: Path) -> None:
        """`_set_aside` where directories cannot be renamed: copy, sync, then remove."""
        copy = self._free_name(self.root / f".trash-copy-{step}")
        folders = self._folders_in(self.path(step))
        for name in ("", *folders):
            self._copy_folder(self.path(step) / name, copy / name)
        if folders:
            self.ops.sync_dir(copy)  # once more, since they were made after the first
        self.ops.rename(copy, target)
        self._sync_moves(target.parent.name)
        self._entomb(step)

    def _copy_folder(self, source: Path, target: Path) -> None:
        self.ops.mkdir(target)
        for name, kind in self.ops.scan(source).items():
            if kind is Kind.FILE:  # a checkpoint contains nothing else, but for its folders
                self._copy_file(source / name, target / name)
        self.ops.sync_dir(target)

    def _copy_file(self, source: Path, target: Path) -> None:
        with (
            contextlib.closing(self.ops.open_for_read(source)) as file,
            contextlib.closing(self.ops.create_payload(target, num_bytes=file.size)) as copy,
        ):
            buffer = memoryview(mmap.mmap(-1, _COPY_BYTES))
            for start in range(0, file.size, _COPY_BYTES):
                count = file.preadinto(buffer, start)
                copy.pwrite(buffer[: round_up_to_page(count)], start)
            copy.truncate(file.size)
            copy.datasync()

    def _entomb(self, step: int) -> None:
        """Remove a step that cannot be renamed: from the first sync on it does not count."""
        self.ops.write_file(self._tombstone(step), b"")
        # Before any file is removed: otherwise a power cut could leave half of a checkpoint.
        self.ops.sync_dir(self.root)
        self._bury(step)

    def _bury(self, step: int) -> None:
        """Remove what is left of an entombed step, and then its tombstone."""
        if self.ops.exists(self.path(step)):
            self._remove(self.path(step))
            self.ops.sync_dir(self.root)
        self.ops.unlink(self._tombstone(step))

    def _try_to_bury(self, step: int) -> None:
        try:
            self._bury(step)
        except OSError as error:
            logger.warning("what is left of step %d stays for now: %s", step, error)

    def _tombstone(self, step: int) -> Path:
        return self.root / f".gone-{step}"

    def _sync_moves(self, folder: str) -> None:
        # The destination first: a power cut in between must not lose the step from both.
        self.ops.sync_dir(self.root / folder)
        self.ops.sync_dir(self.root)

    def _move_to_trash(self, step: int) -> Path | None:
        """Rename a step, to be removed after a sync; None if it had to be removed at once."""
        target = self._free_name(self.root / f".trash-{step}")
        faults.reach("prune.rename")
        try:
            self.ops.rename(self.path(step), target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._entomb(step)
            return None
        return target

    def _remove(self, path: Path) -> None:
        """Remove a directory, or anything else with that name; a link itself, not its target."""
        if self.ops.is_dir(path):
            self.ops.remove_tree(path)
        else:
            self.ops.unlink(path)

    def _free_name(self, path: Path) -> Path:
        candidate, number = path, 0
        while self.ops.exists(candidate):
            number += 1
            candidate = path.with_name(f"{path.name}.{number}")
        return candidate

    def _make_durable_dir(self, path: Path) -> None:
        """Make a directory and its missing parents, and each entry durable."""
        if self.ops.is_dir(path):
            return
        self._make_durable_dir(path.parent)
        try:
            self.ops.mkdir(path)
        except FileExistsError:
            kind = self.ops.kind(path)
            if kind in (Kind.LINK, Kind.OTHER):
                raise ForeignEntryError.at(path, kind.value) from None
            if kind is not Kind.DIRECTORY:  # if it is one, another rank was faster
                raise
        self.ops.sync_dir(path.parent)

    def _try_to_remove(self, name: str, *, until: str) -> None:
        try:
            self._remove(self.root / name)
        except OSError as error:
            logger.warning("%s is left until %s: %s", self.root / name, until, error)

    def _append_mark(self, line: str) -> None:
        path = self.root / _MARKS
        self.ops.append_line(path, line)
        self.ops.sync_file(path)
        self.ops.sync_dir(self.root)

    def _marks_bytes(self) -> bytes:
        path = self.root / _MARKS
        if not self.ops.exists(path):
            return b""
        return self.ops.read_bytes(path, max_bytes=MARKS_MAX_BYTES)

    def _marked(self, steps: set[int]) -> list[int]:
        """Those of ``steps`` that have marks. Cheap if none has: the file is not parsed."""
        data = self._marks_bytes()
        if not any(re.search(rb'"step"\s*:\s*%d\b' % step, data) for step in steps):
            return []
        return sorted(steps.intersection(read_marks(data, path=self.root / _MARKS)))

    def _forget_marks_of_others(self, steps: set[int]) -> None:
        """Drop the marks of removed steps, once the file has become long."""
        path = self.root / _MARKS
        if not self.ops.exists(path) or self.ops.file_size(path) <= self._long_marks_bytes:
            return
        try:
            marks = read_marks(self._marks_bytes(), path=path)
            lines = [line_of(step, mark) for step, mark in sorted(marks.items()) if step in steps]
            data = "".join(f"{line}\n" for line in lines).encode()
            self.ops.replace_file(path, data)
            self.ops.sync_dir(self.root)
        except (CheckFreqError, OSError) as error:
            # Only logged: the steps are removed, and the caller must learn that.
            logger.warning("%s is not shortened: %s", path, error)
        else:
            self._long_marks_bytes = max(_LONG_MARKS_BYTES, 2 * len(data))

    # The pieces of reading.

    def _kinds(self, path: Path, *, beginning: tuple[str, ...] = ("",)) -> Mapping[str, Kind]:
        """The entries of a directory; none if it is missing, or is a link."""
        try:
            return self.ops.scan(path, beginning=beginning)
        except (FileNotFoundError, ForeignEntryError):
            return {}

    def _of_committed(self, step: int, path: Path, read: Callable[[], T]) -> T:
        """``read()`` of a file that a committed step must have.

        If it is missing, not a regular file, or far too large, that is corruption.
        """
        try:
            return read()
        except StorageError as error:
            raise CorruptCheckpointError(
                str(error.filename or path),
                check="file",
                expected="a regular file",
                got=error.strerror,
            ) from None
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self.ops.exists(self.path(step)):
                raise NoCheckpointError(f"{self.root} holds no checkpoint of step {step}") from None
            raise CorruptCheckpointError(
                str(path), check="file", expected="a regular file", got=error.strerror
            ) from None

    def _read_record(self, path: Path) -> bytes:
        """The bytes of a record; CorruptCheckpointError if they are more than a record can have.

        The bound is cheap for a record below the fixed allowance; only above it are the headers
        of the payloads read.
        """
        try:
            return self.ops.read_bytes(path, max_bytes=STATE_BYTES)
        except StorageError as error:
            if error.errno != errno.EFBIG:
                raise
        num_bytes, most = self.ops.file_size(path), self._most_record_bytes(path.parent)
        if num_bytes > most:
            raise CorruptCheckpointError(
                str(path), check="size in bytes", expected=f"at most {most}", got=num_bytes
            )
        return self.ops.read_bytes(path, max_bytes=most)

    def _most_record_bytes(self, directory: Path) -> int:
        """The largest record allowed, by the payloads beside it and their headers."""
        headers = payloads = 0
        for name in self.ops.listdir(directory):
            if name.endswith(_PAYLOAD):
                file = self.ops.open_for_read(directory / name)
                try:
                    headers += header_bytes(file)
                    payloads += file.size
                finally:
                    file.close()
        return most_bytes(headers, payloads)

    def _newest_intact(self, steps: Iterable[int]) -> int | None:
        for step in sorted(steps, reverse=True):
            try:
                self.glance(step)
            except CheckFreqError:
                continue
            return step
        return None


def pending_of(name: str) -> tuple[int, str] | None:
    """Step and attempt of the pending directory with this name; None for other names."""
    match = _PENDING.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def _gone_among(names: Iterable[str]) -> set[int]:
    found = (_GONE.fullmatch(name) for name in names)
    return {int(match[1]) for match in found if match is not None}


def step_of(name: str) -> int | None:
    """The step whose directory has this name; None for other names."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    return step if name == f"step-{step:08d}" else None
