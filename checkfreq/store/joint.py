"""One checkpoint written by several ranks: each writes a part, and the leader commits them all.

They write into one directory, named after the attempt that they agreed on::

    .tmp-<step>-<attempt>/  payloads of every rank, part-<rank>.json of every rank but the leader
                            (or failed-<rank>.txt, which says why there is none); from the 64th
                            rank on in folders, where the records make a tree (see `places`)

A part manifest is written last and appears by a rename, so a part that is visible is complete.
The leader waits for all parts, merges them into the manifest, and commits as a single rank does.
Where the records of the ranks make a tree (see `tree`), the parts stay, the leader has one too, and
the manifest names them.
A member touches only its own files, and none of them once its part manifest is there, since the
leader may be committing. A leader that gives up removes the directory, even while members write
to it, and once more before its next attempt; it never removes a directory that may belong to a
later attempt. A worker that replaces one that was killed continues with the files it finds.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from checkfreq import faults
from checkfreq.errors import CheckFreqError, PersistError
from checkfreq.store.fileops import FileOps
from checkfreq.store.gc_pause import gc_paused
from checkfreq.store.manifest import MANIFEST_NAME, Manifest
from checkfreq.store.outline import RankRecord, decode_part, encode_part
from checkfreq.store.parts import (
    check_sizes,
    decode_merged,
    failure_name,
    merge,
    part_name,
    unreadable,
)
from checkfreq.store.store import CheckpointStore, Pending, pending_of
from checkfreq.store.tree import Tree, check_outline, decode_record, tile

logger = logging.getLogger(__name__)

#: Pauses between looks for missing parts double from one to the other. Ranks finish at about the
#: same time, so the first looks come quickly; polling a network file system costs its server.
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
_LOOK = ".look"
#: The text in which a rank says why it wrote no part may include a traceback.
_FAILURE_MAX_BYTES = 1 << 20


class JointStore(CheckpointStore):
    """The checkpoints under ``root``, where several ranks may write one together."""

    def __init__(
        self,
        root: Path,
        *,
        ops: FileOps | None = None,
        is_tree: bool = False,
        is_split: bool = False,
    ) -> None:
        super().__init__(root, ops=ops)
        self._is_tree = is_tree
        self._is_split = is_split
        #: Attempts that this leader aborted, by step and id: what members still write is removed.
        self._ended: set[tuple[int, str]] = set()

    # For the leader, which holds the lock.

    def lead(self, step: int, *, attempt: str, num_bytes: int = 0) -> Pending:
        """Start writing the leader's own part; other ranks may have begun theirs."""
        self._remove_leftovers(step, attempt)
        self._require_room(step, num_bytes)
        faults.reach("commit.mkdir")
        return self._enter(step, attempt)

    def give_up(self, step: int, *, attempt: str) -> None:
        """Remove an attempt's directory, with the parts of all ranks.

        Members may still be writing there and create it again, so `lead` removes it once more.
        """
        self.abort(self._shared(step, attempt))

    def abort(self, pending: Pending) -> None:
        """See CheckpointStore."""
        self._ended.add((pending.step, pending.attempt))
        super().abort(pending)

    def is_committed(self, step: int, *, attempt: str) -> bool:
        """Whether the attempt became the checkpoint of its step; if so, it is durable on return."""
        record = self._record_in(self.path(step))
        if record is None or record.attempt != attempt:
            return False
        self.ops.sync_dir(self.root)  # the worker that renamed it may have died before its sync
        return True

    def record_left(self, pending: Pending) -> Manifest | Tree | None:
        """The complete record that a killed leader left, if any: all files it names are durable."""
        return self._record_in(pending.path)

    def wait_for_parts(
        self,
        pending: Pending,
        ranks: Collection[int],
        *,
        timeout_s: float,
        orphaned_timeout_s: float = math.inf,
        is_orphaned: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Wait until the parts of these ranks are there; PersistError names the missing ones.

        Polls the directory, since other machines write there and cannot notify us. Raises at once
        when a rank left a file that says it failed. Once ``is_orphaned()``, waits no longer than
        ``orphaned_timeout_s`` in all.
        """
        faults.reach("parts.wait")
        start_s, pause_s = clock(), _FIRST_PAUSE_S
        missing = sorted(ranks)
        while missing := self._missing(pending, missing):
            limit_s = min(timeout_s, orphaned_timeout_s) if is_orphaned() else timeout_s
            left_s = start_s + limit_s - clock()
            if left_s <= 0:
                named = ", ".join(str(rank) for rank in missing)
                raise PersistError(
                    f"step {pending.step} was not committed: rank(s) {named} wrote no part within "
                    f"{limit_s:g} s (lost, late, or {self.root} is not the same for all)",
                    step=pending.step,
                    phase="parts",
                )
            sleep(min(pause_s, left_s))
            if pause_s == _LONGEST_PAUSE_S:
                self._look_afresh(pending, missing)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def merge_parts(
        self, pending: Pending, own: Manifest, ranks: Collection[int]
    ) -> Manifest | Tree:
        """The record of all ranks, merged from the leader's ``own`` and the parts of ``ranks``.

        Raises PersistError for a part that is damaged, of a different checkpoint, or does not fit.
        """
        if self._is_tree:
            return self._grow(pending, own, ranks)
        faults.reach("parts.merge")
        sizes = pending.sizes(ranks)
        return merge(own, [self._part(pending, own, rank, sizes) for rank in ranks])

    def _grow(self, pending: Pending, own: Manifest, ranks: Collection[int]) -> Tree:
        """The tree of all ranks' records. The leader's own is written now.

        One that a killed leader left is replaced, as its payloads were.
        """
        (leader,) = own.ranks
        everyone = sorted({leader, *ranks})
        with contextlib.suppress(FileNotFoundError):
            self.ops.unlink(pending.path_of(part_name(leader)))
        self.write_part(pending, replace(own, objects={}))
        faults.reach("parts.merge")
        with gc_paused():
            sizes = pending.sizes(everyone)
            records = [self._rank_record(pending, own, rank, sizes) for rank in everyone]
        is_whole = len(everyone) == own.world
        if not (is_whole and tile(own, [record.outline for record in records])):
            # Slower, and exact: it says which tensor of which rank, and whether anything is wrong.
            parts = (self._decoded(pending, rank) for rank in everyone if rank != leader)
            merge(own, [*parts])
        with gc_paused():
            return Tree.of(own, records)

    def _rank_record(
        self, pending: Pending, own: Manifest, rank: int, sizes: Mapping[str, int]
    ) -> RankRecord:
        path = pending.path_of(part_name(rank))
        try:
            record = RankRecord.read(self._read_record(path), path=path)
        except CheckFreqError as error:
            raise unreadable(own, rank, error) from error
        check_outline(record.outline, of=own, rank=rank)
        check_sizes(own, record.outline.files, sizes, rank=rank)
        return record

    def _decoded(self, pending: Pending, rank: int) -> Manifest:
        path = pending.path_of(part_name(rank))
        return decode_part(self._read_record(path), path=path)

    # For the other ranks, which hold no lock.

    def join(self, step: int, *, attempt: str, rank: int, num_bytes: int = 0) -> Pending | None:
        """Start writing a rank's part; None if it was written already, or is committed."""
        faults.reach("parts.join")
        if self._has_part(step, attempt, rank):
            return None
        self._require_room(step, num_bytes)
        return self._enter(step, attempt)

    def write_part(self, pending: Pending, part: Manifest) -> None:
        """Write the part manifest, after the rank's payloads are finished.

        Raises FileNotFoundError if the leader gave up and removed the directory.
        """
        self._check_payloads(pending, part)
        (rank,) = part.ranks
        path = pending.make_way(part_name(rank))
        hidden = _hidden(path)
        faults.reach("parts.write_manifest")
        self.ops.write_file(hidden, self._encoded(part))
        faults.reach("parts.sync_manifest")
        self.ops.sync_file(hidden)
        faults.reach("parts.rename")
        # Before the rename, which may succeed and still report an error: from then on the
        # leader may be committing these files, and they must not be removed.
        pending.disown_created()
        self.ops.rename(hidden, path)
        self._sync_pending(pending, rank)

    def tell_failure(self, step: int, *, attempt: str, rank: int, why: str) -> None:
        """Tell the leader that there will be no part, so that it gives up without a timeout.

        Does nothing if the part is there: the leader may be committing it.
        """
        if self._has_part(step, attempt, rank):
            return
        path = self._enter(step, attempt).make_way(failure_name(rank))
        hidden = _hidden(path)
        with contextlib.suppress(OSError):  # a full disk may still take an empty file
            self.ops.write_file(hidden, why.encode(errors="replace")[:_FAILURE_MAX_BYTES])
        with contextlib.suppress(FileExistsError):  # the leader was told before
            self.ops.rename(hidden, path)  # atomically: the leader may be reading the directory

    def leave(self, pending: Pending, *, rank: int) -> None:
        """Remove a rank's files of a part that it cannot finish, and nothing else."""
        pending.remove_created()
        with contextlib.suppress(FileNotFoundError):
            self.ops.unlink(_hidden(pending.path_of(part_name(rank))))

    # Inside.

    def _encoded(self, part: Manifest) -> bytes:
        return encode_part(part, is_split=self._is_split) if self._is_tree else part.encode()

    def _enter(self, step: int, attempt: str) -> Pending:
        with contextlib.suppress(FileExistsError):
            self.ops.mkdir(self._pending_path(step, attempt))
        return self._shared(step, attempt)

    def _shared(self, step: int, attempt: str) -> Pending:
        path = self._pending_path(step, attempt)
        return Pending(step, attempt, path, self.ops, is_shared=True, has_folders=self._is_tree)

    def _remove_leftovers(self, step: int, attempt: str) -> None:
        """Remove directories of earlier attempts; the leader works on one attempt at a time.

        Not those of other attempts of this step: the step may have been taken again since this
        attempt began, and members may have written their parts of that one already.
        """
        self._ended = {ended for ended in self._ended if ended[0] >= step}
        for name in self.ops.listdir(self.root):
            other = pending_of(name)
            if other is None or other == (step, attempt):
                continue
            if other[0] < step or other in self._ended:
                self._try_to_remove(name, until="the next checkpoint")

    def _look_afresh(self, pending: Pending, ranks: Collection[int]) -> None:
        """Change the folders, so that a network file system does not list them from its cache."""
        for folder in self._folders_of(pending, ranks):
            with contextlib.suppress(OSError):  # then the listing stays as stale as it may be
                self.ops.write_file(folder / _LOOK, b"")
                self.ops.unlink(folder / _LOOK)

    def _folders_of(self, pending: Pending, ranks: Collection[int]) -> list[Path]:
        return [pending.path / folder for folder in sorted({*map(pending.folder_of, ranks)})]

    def _missing(self, pending: Pending, ranks: Collection[int]) -> list[int]:
        """Those of the ranks that have written no part; PersistError if one failed to."""
        there: set[str] = set()
        for folder in self._folders_of(pending, ranks):
            try:
                there.update(self.ops.listdir(folder))
            except FileNotFoundError:  # none of its ranks has begun, unless all of it is gone
                if not self.ops.exists(pending.path):
                    raise
        missing = [rank for rank in ranks if part_name(rank) not in there]
        self._require_no_failure(pending, [rank for rank in missing if failure_name(rank) in there])
        return missing

    def _require_no_failure(self, pending: Pending, failed: Collection[int]) -> None:
        if failed:
            texts = (self._failure(pending, rank) for rank in failed)
            why = "; ".join(
                f"rank {rank} wrote no part: {text or 'it could not say why'}"
                for rank, text in zip(failed, texts, strict=True)
            )
            raise PersistError(
                f"step {pending.step} was not committed: {why}", step=pending.step, phase="parts"
            )

    def _failure(self, pending: Pending, rank: int) -> str:
        path = pending.path_of(failure_name(rank))
        return self.ops.read_bytes(path, max_bytes=_FAILURE_MAX_BYTES).decode(errors="replace")

    def _part(
        self, pending: Pending, own: Manifest, rank: int, sizes: Mapping[str, int]
    ) -> Manifest:
        path = pending.path / part_name(rank)
        part = decode_merged(self._read_record(path), path=path, of=own, rank=rank)
        expected = {file.name: file.num_bytes for file in part.files}
        check_sizes(part, expected, sizes, rank=rank)
        return part

    def _has_part(self, step: int, attempt: str, rank: int) -> bool:
        """Whether a rank's part was written, in whichever of three places it is now.

        In the order in which a part moves (its own file, the merged record, the committed step),
        so that it is not missed if the leader moves it in between.
        """
        pending = self._shared(step, attempt)
        if self.ops.exists(pending.path_of(part_name(rank))):
            self._sync_pending(pending, rank)  # whoever wrote it may have died before
            return True
        record = self._record_in(pending.path)
        if isinstance(record, Manifest) and rank in record.ranks:
            return True
        return self.is_committed(step, attempt=attempt)

    def _record_in(self, directory: Path) -> Manifest | Tree | None:
        path = directory / MANIFEST_NAME
        try:
            return decode_record(self._read_record(path), path=path)
        except (CheckFreqError, FileNotFoundError):
            return None

    def _sync_pending(self, pending: Pending, rank: int) -> None:
        """Sync so that a worker that takes over finds the part after a power cut.

        A failure is no error: the leader syncs all folders before it commits.
        """
        try:
            if folder := pending.folder_of(rank):
                self.ops.sync_dir(pending.path / folder)
            self.ops.sync_dir(pending.path)
        except FileNotFoundError:  # the leader committed or removed it
            pass
        except OSError as error:
            logger.warning("%s could not be synced by a member: %s", pending.path, error)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")
