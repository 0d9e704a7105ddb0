"""Several ranks commit one checkpoint: each writes its part, the leader makes them one.

All write into the directory of the same attempt, whose name they agreed on::

    .tmp-<step>-<attempt>/  payloads of every rank, part-<rank>.json of every rank but the leader
                            (or failed-<rank>.txt, which says why there is none)

A part manifest is written last, under its name in one instant, so that a part which is there
is whole. The leader waits for all, merges them into the manifest, and commits as a single rank
does. A member touches only what is its own, and nothing at all once its part is there: the
leader may be committing. A leader that gives up removes the directory under the members' hands,
and again before a later attempt; what may be of attempts yet to come it leaves alone. A worker
that takes over from one that was killed goes on from what is there.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection
from pathlib import Path

from checkfreq import faults
from checkfreq.errors import CheckFreqError, PersistError
from checkfreq.store.fileops import FileOps
from checkfreq.store.manifest import MANIFEST_NAME, Manifest
from checkfreq.store.parts import (
    check_sizes,
    decode_part,
    failure_name,
    merge,
    part_name,
    rank_of,
)
from checkfreq.store.store import CheckpointStore, Pending, pending_of

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
_LOOK = ".look"
#: Why a rank wrote no part: a message with a traceback.
_FAILURE_MAX_BYTES = 1 << 20


class JointStore(CheckpointStore):
    """The checkpoints under ``root``, that several ranks may write."""

    def __init__(self, root: Path, *, ops: FileOps | None = None) -> None:
        super().__init__(root, ops=ops)
        #: Steps and attempts that this leader committed or gave up: nobody needs them any more.
        self._ended: set[tuple[int, str]] = set()

    # The leader, who holds the lock.

    def lead(self, step: int, *, attempt: str, num_bytes: int = 0) -> Pending:
        """Start writing what the leader itself contributes; other ranks may have begun."""
        self._remove_leftovers(step, attempt)
        self._require_room(step, num_bytes)
        faults.reach("commit.mkdir")
        return self._enter(step, attempt)

    def give_up(self, step: int, *, attempt: str) -> None:
        """Drop an attempt, whoever wrote of it, now and again when there is more of it."""
        self.abort(Pending(step, attempt, self._pending_path(step, attempt), self.ops))

    def abort(self, pending: Pending) -> None:
        """See CheckpointStore."""
        self._ended.add((pending.step, pending.attempt))
        super().abort(pending)

    def is_committed(self, step: int, *, attempt: str) -> bool:
        """Whether the attempt became the checkpoint of its step; if so, durably."""
        record = self._record_in(self.path(step))
        if record is None or record.attempt != attempt:
            return False
        self.ops.sync_dir(self.root)  # whoever renamed it may not have come so far
        return True

    def record_left(self, pending: Pending) -> Manifest | None:
        """The whole record that a killed leader left: all that it names is durable."""
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
        """Return once the parts of these ranks are there; PersistError names those that are not.

        At once if one of them says that it failed. Otherwise there is nothing to be told by:
        another machine writes them. Once ``is_orphaned()``, the wait is no longer than that time.
        """
        faults.reach("parts.wait")
        start_s, pause_s = clock(), _FIRST_PAUSE_S
        while missing := self._missing(pending, ranks):
            self._require_no_failure(pending, missing)
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
                self._look_afresh(pending.path)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def merge_parts(self, pending: Pending, own: Manifest, ranks: Collection[int]) -> Manifest:
        """The manifest of all, out of the leader's ``own`` and the parts of ``ranks``.

        Raises PersistError for a part that is damaged, of something else, or does not fit.
        """
        faults.reach("parts.merge")
        return merge(own, [self._part(pending, own, rank) for rank in ranks])

    # The other ranks, who hold no lock.

    def join(self, step: int, *, attempt: str, rank: int, num_bytes: int = 0) -> Pending | None:
        """Start writing a rank's part; None if it is there already, or committed."""
        faults.reach("parts.join")
        if self._has_part(step, attempt, rank):
            return None
        self._require_room(step, num_bytes)
        return self._enter(step, attempt)

    def write_part(self, pending: Pending, part: Manifest) -> None:
        """Put the part manifest in its place, the rank's payloads being finished.

        Raises FileNotFoundError when the leader gave up and removed the directory.
        """
        self._check_payloads(pending, part)
        (rank,) = part.ranks
        path = pending.path / part_name(rank)
        hidden = _hidden(path)
        faults.reach("parts.write_manifest")
        self.ops.write_file(hidden, part.encode())
        faults.reach("parts.sync_manifest")
        self.ops.sync_file(hidden)
        faults.reach("parts.rename")
        pending.disown_created()  # whatever happens now: the leader may be committing them
        self.ops.rename(hidden, path)
        self._sync_pending(pending.path)

    def tell_failure(self, step: int, *, attempt: str, rank: int, why: str) -> None:
        """Have the leader give the attempt up now, and not when it has waited in vain.

        Nothing is told of a part that is there: the leader may be committing it.
        """
        if self._has_part(step, attempt, rank):
            return
        path = self._enter(step, attempt).path / failure_name(rank)
        hidden = _hidden(path)
        with contextlib.suppress(OSError):  # a full disk may have room for the name alone
            self.ops.write_file(hidden, why.encode(errors="replace")[:_FAILURE_MAX_BYTES])
        with contextlib.suppress(FileExistsError):  # told before
            self.ops.rename(hidden, path)  # in one step: the leader may be looking

    def leave(self, pending: Pending, *, rank: int) -> None:
        """Remove what a rank wrote of a part that it cannot finish; the rest is the leader's."""
        pending.remove_created()
        with contextlib.suppress(FileNotFoundError):
            self.ops.unlink(_hidden(pending.path / part_name(rank)))

    # Inside.

    def _enter(self, step: int, attempt: str) -> Pending:
        path = self._pending_path(step, attempt)
        with contextlib.suppress(FileExistsError):
            self.ops.mkdir(path)
        return Pending(step, attempt, path, self.ops, is_shared=True)

    def _remove_leftovers(self, step: int, attempt: str) -> None:
        """Directories of attempts before this one: the leader takes one after the other.

        Not of every attempt of this step: it may have been taken again since this one began,
        and the members may be done with that.
        """
        self._ended = {ended for ended in self._ended if ended[0] >= step}
        for name in self.ops.listdir(self.root):
            other = pending_of(name)
            if other is None or other == (step, attempt):
                continue
            if other[0] < step or other in self._ended:
                self._try_to_remove(name, until="the next checkpoint")

    def _look_afresh(self, directory: Path) -> None:
        """Change the directory, so that a network file system lists it anew, not as it was."""
        with contextlib.suppress(OSError):  # the disk is full, or the list is as good as it gets
            self.ops.write_file(directory / _LOOK, b"")
            self.ops.unlink(directory / _LOOK)

    def _missing(self, pending: Pending, ranks: Collection[int]) -> list[int]:
        there = {rank_of(name) for name in self.ops.listdir(pending.path)} if ranks else set()
        return sorted(set(ranks) - there)

    def _require_no_failure(self, pending: Pending, missing: Collection[int]) -> None:
        there = set(self.ops.listdir(pending.path))
        failed = [rank for rank in missing if failure_name(rank) in there]
        if failed:
            texts = (self._failure(pending, rank) for rank in failed)
            why = "; ".join(
                f"rank {rank} wrote no part: {text or 'it cannot say why'}"
                for rank, text in zip(failed, texts, strict=True)
            )
            raise PersistError(
                f"step {pending.step} was not committed: {why}", step=pending.step, phase="parts"
            )

    def _failure(self, pending: Pending, rank: int) -> str:
        path = pending.path / failure_name(rank)
        return self.ops.read_bytes(path, max_bytes=_FAILURE_MAX_BYTES).decode(errors="replace")

    def _part(self, pending: Pending, own: Manifest, rank: int) -> Manifest:
        path = pending.path / part_name(rank)
        part = decode_part(self._read_record(path), path=path, of=own, rank=rank)
        sizes = {file.name: self._size_of(pending.path / file.name) for file in part.files}
        check_sizes(part, sizes, rank=rank)
        return part

    def _size_of(self, path: Path) -> int | None:
        try:
            return self.ops.file_size(path)
        except FileNotFoundError:
            return None

    def _has_part(self, step: int, attempt: str, rank: int) -> bool:
        """Looked for where it goes from one place to the next, so that it is never missed."""
        path = self._pending_path(step, attempt)
        if self.ops.exists(path / part_name(rank)):
            self._sync_pending(path)  # the worker that wrote it may not have come so far
            return True
        record = self._record_in(path)
        if record is not None and rank in record.ranks:
            return True
        return self.is_committed(step, attempt=attempt)

    def _record_in(self, directory: Path) -> Manifest | None:
        path = directory / MANIFEST_NAME
        try:
            return Manifest.decode(self._read_record(path), path=path)
        except (CheckFreqError, FileNotFoundError):
            return None

    def _sync_pending(self, path: Path) -> None:
        """For the sake of those who take over: the leader syncs all there is before it commits."""
        try:
            self.ops.sync_dir(path)
        except FileNotFoundError:  # the leader took it
            pass
        except OSError as error:
            logger.warning("%s could not be synced by a member: %s", path, error)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")
