"""The worker's side of one persist: from a snapshot in a slot to a committed checkpoint.

A single rank writes the whole checkpoint. Where several ranks share the directory, each writes
its part; one of them, the leader, then waits for the others' parts and commits. Everything here
runs on the worker's request thread.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from checkfreq.errors import PersistError
from checkfreq.persist import protocol as p
from checkfreq.persist.guard import DirectoryGuard
from checkfreq.persist.lock import DirectoryLock
from checkfreq.persist.sharing import Sharing
from checkfreq.persist.writer import SnapshotWriter, WriteResult
from checkfreq.store.joint import JointStore
from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.store.store import Pending
from checkfreq.store.tree import Tree
from checkfreq.types import FileSpec, Role

#: Free space required beyond the checkpoint's own bytes, for the manifest, pointer and events.
SPARE_BYTES = 4 << 20
#: Once its trainer is gone, a leader waits this long for the others' parts (or twice as long as its
#: own took, if that is longer) instead of ``part_timeout_s``: the next run may wait for the lock.
#: The second timeout applies after a part did not come: a lost rank writes no later part either.
_ORPHAN_PARTS_S = 10.0
_ORPHAN_PARTS_AGAIN_S = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class OpenDirectory:
    """The opened directory, and the state that one worker's tasks share.

    ``lock`` and ``guard`` are None in a member, which neither locks the directory nor changes the
    set of checkpoints. ``is_orphaned`` tells whether the trainer is gone.
    """

    role: Role
    store: JointStore
    writer: SnapshotWriter
    lock: DirectoryLock | None
    guard: DirectoryGuard | None = None
    is_orphaned: Callable[[], bool] = lambda: False
    #: Steps that the mirror has no copy of and wants one: they are not pruned.
    held: Callable[[], frozenset[int]] = frozenset
    slots: dict[int, mmap.mmap] = field(default_factory=dict)
    layouts: dict[int, tuple[FileSpec, ...]] = field(default_factory=dict)
    full_copy_every: int = 1
    sharing: Sharing = field(init=False)
    #: A commit of this worker has set the later steps aside. Snapshots that were handed over
    #: before the trainer heard of that commit still carry the same request, and would now set
    #: aside this run's own steps.
    has_superseded: bool = False
    #: After the trainer died, a commit waited for a part that never came.
    has_waited_in_vain: bool = False

    def __post_init__(self) -> None:
        self.sharing = Sharing(self.store, full_copy_every=self.full_copy_every)

    def ensure_held(self) -> None:
        """Lock the directory again if someone removed, replaced or unlocked it.

        Raises StorageError where that is not safe. Does nothing in a member: the leader's worker
        does it.
        """
        if self.guard is not None:
            self.guard.ensure()

    def is_held(self) -> bool:
        """Whether this worker may go on here: a member always may."""
        return self.lock is None or self.lock.is_held()

    def note(
        self, *, committed: int | None = None, gone: Callable[[int], bool] = lambda step: False
    ) -> None:
        """Record which steps this worker added to the directory, and which it took away."""
        if self.guard is not None:
            self.guard.note(committed=committed, gone=gone)

    def require_lock(self, consequence: str = "") -> None:
        """Raise PermissionError unless this worker may change the set of checkpoints."""
        if self.lock is None:
            raise PermissionError(f"rank {self.role.leader} leads, not rank {self.role.rank}")
        if not self.lock.is_held():
            raise PermissionError(f"the lock on the checkpoint directory was lost{consequence}")

    def maintain(self, request: p.Maintenance) -> tuple[int, ...]:
        """Carry out a maintenance request; returns the steps it concerned."""
        if isinstance(request, p.TellFailure):
            return self._tell_failure(request)
        self.ensure_held()
        self.require_lock()
        match request:
            case p.Prune():
                held = self.held() | self.sharing.reserve()
                gone = self.store.prune(step for step in request.steps if step not in held)
                self.note(gone=gone.__contains__)
                return tuple(s for s in request.steps if s in gone or not self.store.holds(s))
            case p.AddMark():
                self.store.add_mark(
                    request.step,
                    keep=request.keep or None,
                    metrics=request.metrics,
                    finished=request.finished,
                    at_epoch_end=request.at_epoch_end,
                )
            case p.Quarantine():
                self.sharing.forget()
                self.store.quarantine(request.step, request.reason)
                self.note(gone=request.step.__eq__)
            case p.Confirm():
                self.store.note_common(request.step)
        return (request.step,)

    def _tell_failure(self, request: p.TellFailure) -> tuple[int, ...]:
        self.store.tell_failure(
            request.step, attempt=request.attempt, rank=self.role.rank, why=request.why
        )
        return (request.step,)


class PersistTask:
    """One ``Persist`` request, carried out as a single rank does it; ``phase`` names the stage."""

    def __init__(self, directory: OpenDirectory, request: p.Persist) -> None:
        self._directory = directory
        self._request = request
        self._pending: Pending | None = None
        self._start_s = self._written_s = time.perf_counter()
        self._is_direct = False
        #: The record of the step once it is committed; None in a member, which commits none.
        self._record: Manifest | Tree | None = None
        #: The files that the checkpoint may share with the one before, and those that it does.
        self._unchanged: dict[str, FileEntry] = {}
        self._linked: dict[str, FileEntry] = {}
        #: What this rank wrote, once it is written; with a single rank the same.
        self.own_record: Manifest | None = None
        self.phase = "prepare"

    def run(self) -> p.Committed:
        """Write and commit the checkpoint; if this raises, call `clean_up` with the error."""
        request = self._request
        self._find_unchanged()
        kept_existing = self._carry_out(self._new_bytes() + SPARE_BYTES)
        ended_s = time.perf_counter()
        record = self._record
        return p.Committed(
            attempt=request.attempt,
            step=request.step,
            num_bytes=self._num_bytes(),
            write_s=self._written_s - self._start_s,
            persist_s=ended_s - self._start_s,
            ended_s=ended_s,
            direct=self._is_direct,
            kept_existing=kept_existing,
            warning="; ".join(filter(None, (self._add_marks(), self._directory.sharing.warning()))),
            is_part=not self._directory.role.leads,
            created_unix_s=0.0 if record is None else record.created_unix_s,
            total_bytes=0 if record is None else record.num_bytes,
            free_bytes=self._free_bytes(),
            linked_bytes=sum(entry.num_bytes for entry in self._linked.values()),
        )

    def clean_up(self, error: Exception) -> None:
        """Remove the files written before ``run`` raised ``error``."""
        if self._pending is not None:
            with contextlib.suppress(OSError):  # the disk may be gone; the next open() cleans up
                self._directory.store.abort(self._pending)

    def missing_bytes(self, error: Exception) -> int:
        """After `clean_up`: the room that was missing if ``error`` says that the disk is full."""
        if not isinstance(error, OSError) or error.errno not in _FULL:
            return 0
        needed = self._new_bytes() + SPARE_BYTES
        missing = needed - (self._free_bytes() or 0)
        return missing if missing > 0 else needed  # a quota: what is free says nothing

    def _num_bytes(self) -> int:
        return sum(file.num_bytes for file in self._files())

    def _new_bytes(self) -> int:
        """Bytes to be written: all but those of files that are linked."""
        return self._num_bytes() - sum(entry.num_bytes for entry in self._unchanged.values())

    def _files(self) -> tuple[FileSpec, ...]:
        return self._directory.layouts[self._request.slot]

    def _find_unchanged(self) -> None:
        directory, request = self._directory, self._request
        if not request.contents:
            return
        with memoryview(directory.slots[request.slot]) as slot:
            self._unchanged = directory.sharing.unchanged(request.contents, self._files(), slot)

    def _free_bytes(self) -> int | None:
        store = self._directory.store
        with contextlib.suppress(OSError):
            return store.ops.free_bytes(store.root)
        return None

    def _carry_out(self, num_bytes: int) -> bool:
        """Make the step durable; True if it was already there."""
        self.phase = "begin"
        request = self._request
        self._directory.ensure_held()
        self._pending = self._directory.store.begin(
            request.step, attempt=request.attempt, num_bytes=num_bytes
        )
        return self._commit(self._pending, self._manifest(self._write(self._pending)))

    def _commit(self, pending: Pending, manifest: Manifest | Tree) -> bool:
        directory = self._directory
        self.phase = "commit"
        directory.require_lock("; not committing")
        after = None if directory.has_superseded else self._request.supersede_after
        # Where other directories hold shares of the step, an existing checkpoint of an earlier
        # attempt does not belong to what they commit now. Keeping it would leave the run without
        # a step that all directories have.
        result = directory.store.commit(
            pending, manifest, supersede_after=after, keep_existing=directory.role.shares_all
        )
        directory.has_superseded = directory.has_superseded or after is not None
        written = self.own_record if isinstance(manifest, Tree) else manifest
        if result.kept_existing or written is None:
            directory.sharing.forget()
        else:
            directory.sharing.committed(written, self._request.contents or {}, self._linked)
        directory.note(committed=pending.step, gone=lambda step: after is not None and step > after)
        self._record = manifest
        return result.kept_existing

    def _write(self, pending: Pending) -> WriteResult:
        self.phase = "write"
        self._linked = self._directory.sharing.link(pending, self._unchanged)
        self._unchanged = self._linked
        files = [file for file in self._files() if file.name not in self._linked]
        payloads = [pending.create_payload(file.name, file.num_bytes) for file in files]
        try:
            with memoryview(self._directory.slots[self._request.slot]) as slot:
                written = self._directory.writer.write(files, slot, payloads)
            self.phase = "sync"
            for file, payload in zip(files, payloads, strict=True):
                pending.finish_payload(payload, file.num_bytes)
        finally:
            pending.close()
        self._is_direct = written.direct
        self._written_s = time.perf_counter()
        entries = {**self._linked, **{entry.name: entry for entry in written.files}}
        return WriteResult(tuple(entries[file.name] for file in self._files()), written.direct)

    def _manifest(self, written: WriteResult) -> Manifest:
        self.own_record = own_record(self._request, self._directory.role, written.files)
        return self.own_record

    def _add_marks(self) -> str:
        """Store the marks that came with the request; returns a warning, "" if there is none.

        Does not raise: the step is committed, whatever becomes of its marks.
        """
        request = self._request
        if not (request.keep or request.metrics or request.at_epoch_end):
            return ""
        mark = p.AddMark(
            request.step, request.keep, request.metrics, at_epoch_end=request.at_epoch_end
        )
        try:
            self._directory.maintain(mark)
        except Exception as error:
            return f"its marks were not stored: {type(error).__name__}: {error}"
        return ""


class LeaderTask(PersistTask):
    """The leader's task: write its own part, wait for the others', merge, commit."""

    def _carry_out(self, num_bytes: int) -> bool:
        self.phase = "begin"
        request, directory = self._request, self._directory
        directory.ensure_held()
        if directory.store.is_committed(request.step, attempt=request.attempt):
            # Committed by a worker that was killed before it replied. The parts were removed
            # before that commit: waiting for them again would time out.
            directory.has_superseded = (
                directory.has_superseded or request.supersede_after is not None
            )
            self._record = directory.store.head(request.step)
            return True
        self._pending = directory.store.lead(
            request.step, attempt=request.attempt, num_bytes=num_bytes
        )
        manifest = directory.store.record_left(self._pending)
        if manifest is not None:
            kept_existing = self._commit(self._pending, manifest)
            directory.sharing.forget()  # which of its files are links, only the killed one knew
            return kept_existing
        manifest = self._gather(self._pending, self._manifest(self._write(self._pending)))
        return self._commit(self._pending, manifest)

    def clean_up(self, error: Exception) -> None:
        """Remove the parts of all ranks: they may be there although this rank never began."""
        request = self._request
        if self._pending is not None:
            self._pending.close()
        with contextlib.suppress(OSError):
            self._directory.store.give_up(request.step, attempt=request.attempt)

    def _gather(self, pending: Pending, own: Manifest) -> Manifest | Tree:
        self.phase = "parts"
        role = self._directory.role
        others = [rank for rank in role.group if rank != role.rank]
        try:
            self._wait_for_parts(pending, others)
        except PersistError:
            self._directory.has_waited_in_vain = self._directory.is_orphaned()
            raise
        return self._directory.store.merge_parts(pending, own, others)

    def _wait_for_parts(self, pending: Pending, ranks: list[int]) -> None:
        # All parts take about equally long to write.
        least_s = _ORPHAN_PARTS_AGAIN_S if self._directory.has_waited_in_vain else _ORPHAN_PARTS_S
        self._directory.store.wait_for_parts(
            pending,
            ranks,
            timeout_s=self._request.part_timeout_s,
            orphaned_timeout_s=max(least_s, 2 * (self._written_s - self._start_s)),
            is_orphaned=self._directory.is_orphaned,
        )


class MemberTask(PersistTask):
    """The task of every other rank: write its part."""

    def clean_up(self, error: Exception) -> None:
        request, rank, store = self._request, self._directory.role.rank, self._directory.store
        with contextlib.suppress(OSError):
            if self._pending is not None:
                store.leave(self._pending, rank=rank)
        if isinstance(error, PersistError):  # the leader gave the attempt up and knows
            return
        why = f"{type(error).__name__}: {error} (during {self.phase})"
        with contextlib.suppress(OSError):  # else the leader waits until its timeout
            store.tell_failure(request.step, attempt=request.attempt, rank=rank, why=why)

    def _carry_out(self, num_bytes: int) -> bool:
        self.phase = "join"
        request, role = self._request, self._directory.role
        self._pending = self._directory.store.join(
            request.step, attempt=request.attempt, rank=role.rank, num_bytes=num_bytes
        )
        if self._pending is not None:
            self._write_part(self._pending)
        return False

    def _write_part(self, pending: Pending) -> None:
        try:
            part = self._manifest(self._write(pending))
            self.phase = "part"
            self._directory.store.write_part(pending, part)
        except FileNotFoundError as error:  # only a leader that gave up removes the folder
            raise PersistError(
                f"rank {self._directory.role.leader}, which leads, gave up the attempt: "
                f"{error.filename or pending.path} is gone",
                step=pending.step,
                phase=self.phase,
            ) from error

    def _add_marks(self) -> str:
        return ""  # the leader stores them, once


def own_record(request: p.Persist, role: Role, files: tuple[FileEntry, ...]) -> Manifest:
    """The record of a rank's own part of a checkpoint: all of it if the rank is alone."""
    return Manifest(
        step=request.step,
        attempt=request.attempt,
        world=request.world,
        created_unix_s=time.time(),
        versions=request.versions,
        files=files,
        objects=request.objects if role.leads else {},
        ranks={} if role.is_alone else {role.rank: request.own or {}},
    )


def task_for(directory: OpenDirectory, request: p.Persist) -> PersistTask:
    """The task for a request, by the role of this worker's rank."""
    if directory.role.is_alone:
        return PersistTask(directory, request)
    return (LeaderTask if directory.role.leads else MemberTask)(directory, request)
