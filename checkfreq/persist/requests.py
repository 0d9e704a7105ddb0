"""What a trainer asks of its worker, carried out: the request thread of the persist worker.

Requests are carried out in order. Whoever asked is answered as long as it lives. Of a trainer that
died the results of persists are kept, for the one that takes the worker and was told that they were
in flight; nobody is told of its other requests.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from checkfreq import faults
from checkfreq.events import Event, EventLog, older_generation
from checkfreq.persist import protocol as p
from checkfreq.persist.commit import OpenDirectory, PersistTask, task_for
from checkfreq.persist.guard import DirectoryGuard
from checkfreq.persist.lock import DirectoryLock, LockState, LockTimeoutError
from checkfreq.persist.slots import Slots
from checkfreq.persist.uploads import Uploads
from checkfreq.persist.writer import RateLimiter, SnapshotWriter
from checkfreq.store.joint import JointStore

if TYPE_CHECKING:  # imported when they are needed: most workers start sooner without them
    from checkfreq.mirror.report import MirrorReport
    from checkfreq.notices.watch import News
    from checkfreq.store.fileops import FileOps

#: More than a trainer can have in flight, so more than it can have left unread.
_MOST_UNREAD = 16
#: Events are about a kilobyte; those of unread replies would be the last ones.
_TAIL_BYTES = 64 << 10


@dataclass(eq=False, slots=True)
class Trainer:
    """A training process that this worker works, or worked, for.

    ``opening``: its ``Open``, as it came. ``is_opened``: it was answered before its turn.
    ``keeps``: False once it has said that its end is no accident.
    """

    channel: p.Channel
    pid: int
    gone: threading.Event = field(default_factory=threading.Event)
    opening: p.Open | None = None
    is_opened: bool = False
    keeps: bool = True


class RequestHandler:
    """Carries out requests, in order, on the request thread.

    ``_directory`` is set by ``Open``, which comes first. What the main thread calls says so.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.slots = Slots()
        self._opening: p.Open | None = None
        self._lock = threading.Lock()
        # Below: under the lock, for both threads.
        self._trainer = trainer
        self._ends_at_s: dict[str, float] = {}  # the run, says each source, by ``perf_counter``
        self._inherited: frozenset[str] = frozenset()
        self._late: list[p.Committed | p.Failed] = []
        self._answered: deque[p.Committed] = deque(maxlen=_MOST_UNREAD)
        self._directory: OpenDirectory | None = None
        # Below: the request thread's own.
        self._asker = trainer
        self._refused: Trainer | None = None
        self._events = EventLog(Path(), None)
        self._limiter = RateLimiter(None)
        self._uploads = Uploads(lambda report: None)
        self._has_let_go = False

    # ---- trainers: the main thread

    def heard(self, message: p.Message) -> None:
        """Called with each message as it arrives, before its turn."""
        self.slots.note(message)
        if isinstance(message, p.Open):
            self._trainer.opening = self._opening = message
            self._open_early(self._trainer)

    @property
    def opening(self) -> p.Open | None:
        """How the directory was opened last; None if it was not."""
        with self._lock:
            return None if self._directory is None else self._opening

    def _open_early(self, trainer: Trainer) -> None:
        """Tell a successor at once that the directory is held: it need not wait for what is
        being written."""
        with self._lock:
            directory = self._directory
            trainer.is_opened = directory is not None and directory.is_held()
        if trainer.is_opened:
            self._send(trainer, p.Opened(os.getpid()))

    def trainer_died(self) -> None:
        """Finish as fast as possible: there is no training left to slow down.

        Records the death, and the commits that the trainer did not live to record, which it does at
        the next boundary.
        """
        with self._lock:  # a commit is answered before, or recorded by the request thread
            self._trainer.gone.set()
            answered, directory = [*self._answered], self._directory
            self._answered.clear()
        self._limiter.lift()
        if directory is None or directory.lock is None:  # only the leader records
            return
        recorded = _tail(directory.store.ops, directory.store.root / "events.jsonl")
        for reply in answered:
            line = rf'"durable_monotonic_s": {re.escape(repr(reply.ended_s))}[,}}]'
            if not re.search(line.encode(), recorded):
                self._record_commit(reply)
        if self._trainer.keeps:
            step, _ = self.slots.newest() or (-1, None)
            self.record("killed", step)

    def adopt(self, trainer: Trainer, *, in_flight: frozenset[str]) -> None:
        """``trainer`` has taken this worker, and knows of the attempts ``in_flight``."""
        self._uploads.cut()
        with self._lock:
            self._trainer = trainer
            self._ends_at_s = {}
            self._inherited = in_flight
            self.slots.adopted()
            late, self._late = self._late, []
        for reply in late:
            if reply.attempt in in_flight:
                self._send(trainer, reply)

    def watch(self, request: p.Watch) -> None:
        """Start asking when the run ends: opening may take long."""
        from checkfreq.notices.choice import Watched, sources
        from checkfreq.notices.watch import NoticeWatch

        trainer = self._trainer
        asked = Watched(request.names, request.deadline_unix_s, request.metadata_url)
        watch = NoticeWatch(
            sources(asked, environ=os.environ), tell=lambda news: self._tell_news(trainer, news)
        )
        watch.start()

    def _tell_news(self, trainer: Trainer, news: News) -> None:
        """On the watch thread, which ends with the channel."""
        ends, channel = news.ends, trainer.channel
        if news.unanswered:
            channel.send(p.NoticeUnanswered(news.source, news.unanswered))
            return
        if trainer is self._trainer:  # a new mapping: the mirror's thread may be reading this one
            at_s = math.inf if news.at_s is None else news.at_s
            self._ends_at_s = {**self._ends_at_s, news.source: at_s}
        if ends is None:
            channel.send(p.NoticeGone(news.source))
        else:
            channel.send(p.NoticeSeen(news.source, ends.why, ends.at_unix_s, news.at_s))

    def record(self, kind: str, step: int, **data: object) -> None:
        """Record an event, where this worker's directory has such a log."""
        self._events.append(Event(kind, step, data))

    def _record_commit(self, reply: p.Committed) -> None:
        """Record a commit of which no trainer can."""
        self.record(
            "committed",
            reply.step,
            num_bytes=reply.num_bytes,
            linked_bytes=reply.linked_bytes,
            write_s=reply.write_s,
            persist_s=reply.persist_s,
            durable_monotonic_s=reply.ended_s,
            after_trainer_death=True,
        )

    # ---- the request thread

    def carry_out(self, asker: Trainer, request: p.Message) -> None:
        """Do one request and reply; only an unexpected bug raises."""
        self._asker = asker
        if self._refused is asker:  # it was told, and will end this process
            if isinstance(request, p.Persist):
                self.slots.ended(request, None, durable=False, given_back=False)
            return
        match request:
            case p.Open():
                self._open(request)
            case p.SlotMemory():
                self.slots.map(request, asker.channel.take_fd())
            case p.SlotLayout():
                self.slots.layouts[request.slot] = request.files
            case p.Persist():
                self._persist(request)
            case p.Prune() | p.AddMark() | p.Quarantine() | p.Confirm() | p.TellFailure():
                self._maintain(request)
            case p.PruneMirror():
                self._uploads.remove(request.steps, once=request.once)
            case _:
                raise AssertionError(f"not a request: {request}")

    def let_go(self, trainer: Trainer) -> None:
        """Nothing that ``trainer`` asked is left to do: release the directory, and upload.

        The next run may use the directory meanwhile: its worker uploads once this one is done.
        """
        with self._lock:
            if self._trainer is not trainer:
                return  # there is another one by now, which needs the directory
            if self._directory is not None and self._directory.lock is not None:
                self._directory.lock.release()
        self._uploads.finish(None)
        self._has_let_go = True

    def finish(self, upload_for_s: float | None) -> bool:
        """Release the directory, and upload its newest checkpoint; False if that takes too long."""
        if self._directory is not None and self._directory.lock is not None:
            self._directory.lock.release()
        return self._uploads.finish(0.0 if self._has_let_go else upload_for_s)

    # ---- replies

    def _reply(self, message: p.Message) -> None:
        """Answer whoever asked; the result of a persist may be a successor's to know."""
        with self._lock:
            trainer = self._trainer
            if isinstance(message, p.Committed | p.Failed):
                if trainer.gone.is_set():
                    self._late.append(message)
                    return
                if self._asker is not trainer and message.attempt not in self._inherited:
                    return
            elif self._asker is not trainer:
                return
        self._send(trainer, message)

    @staticmethod
    def _send(trainer: Trainer, message: p.Message) -> None:
        with contextlib.suppress(p.ChannelClosedError):  # a dead trainer needs no answer
            trainer.channel.send(message)

    def _is_orphaned(self) -> bool:
        return self._trainer.gone.is_set()

    # ---- opening

    def _open(self, request: p.Open) -> None:
        asker = self._asker
        try:
            store, lock = self._take_over(request)
        except (OSError, LockTimeoutError) as error:
            self._refused = asker
            is_busy = isinstance(error, LockTimeoutError) and not error.is_sibling
            self._reply(p.OpenFailed(str(error), traceback.format_exc(), is_busy))
            return
        self._uploads.finish(0.0)  # of the trainer before
        self._uploads = Uploads(lambda report: self._report(asker, report))
        self._limiter = RateLimiter(None if asker.gone.is_set() else request.max_write_bytes_per_s)
        directory = self._open_directory(request, store, lock)
        with self._lock:
            self._directory = directory
        self._has_let_go = False
        if not asker.is_opened:
            self._reply(p.Opened(os.getpid()))
        if request.mirror is not None and request.role.leads:
            self._uploads.start(
                request.mirror,
                store,
                owner_pid=asker.pid,
                ends_at_s=lambda: min(self._ends_at_s.values(), default=math.inf),
            )

    def _take_over(self, request: p.Open) -> tuple[JointStore, DirectoryLock | None]:
        """The store, and the leader's lock. A member takes the directory as it finds it.

        Only the leader's worker cleans up what an interrupted run left.
        """
        asker, root = self._asker, Path(request.chk_dir)
        store = JointStore(root, is_tree=request.is_tree, is_split=request.role.split)
        store.make()
        if not request.role.leads:
            return store, None
        lock = self._kept_lock(root)
        if lock is None:
            lock = DirectoryLock(root)
            lock.acquire(
                timeout_s=request.takeover_s,
                owner_pid=asker.pid,
                on_wait=lambda holder: self._reply(p.Waiting(holder)),
                give_up=asker.gone.wait,
            )
        else:
            lock.note_owner(asker.pid)
        store.open(keep_pending=request.keep_pending)
        self._events = EventLog(root / "events.jsonl", store.ops)
        return store, lock

    def _kept_lock(self, root: Path) -> DirectoryLock | None:
        """The lock that this worker has on the directory, for an earlier trainer."""
        if self._directory is None or self._directory.lock is None:
            return None
        lock = self._directory.lock
        if self._directory.store.root == root and lock.state() is LockState.HELD:
            return lock
        lock.release()
        return None

    def _open_directory(
        self, request: p.Open, store: JointStore, lock: DirectoryLock | None
    ) -> OpenDirectory:
        writer = SnapshotWriter(
            num_threads=request.writer_threads,
            chunk_bytes=request.write_chunk_bytes,
            limiter=self._limiter,
        )
        return OpenDirectory(
            request.role,
            store,
            writer,
            lock,
            None if lock is None else self._guard(store, lock, request),
            lambda: self._asker.gone.is_set(),  # a successor changes nothing for what was asked
            self._uploads.held,
            self.slots.memory,
            self.slots.layouts,
            request.full_copy_every,
        )

    def _guard(self, store: JointStore, lock: DirectoryLock, request: p.Open) -> DirectoryGuard:
        return DirectoryGuard(
            store,
            lock,
            owner_pid=self._asker.pid,
            shares=len(request.role.group) > 1,
            on_retaken=lambda message, steps: self._reply(p.Retaken(message, steps)),
        )

    def _report(self, asker: Trainer, report: MirrorReport) -> None:
        """On the mirror's thread."""
        is_done = report.state.value == "idle" and report.step is not None
        if asker.gone.is_set() and is_done:
            self.record("uploaded", report.step or 0, after_trainer_death=True)
        if asker is self._trainer:
            self._send(asker, p.Mirrored(report.to_json()))

    @property
    def _opened(self) -> OpenDirectory:
        assert self._directory is not None, "Open comes first"
        return self._directory

    # ---- persisting

    def _persist(self, request: p.Persist) -> None:
        task = task_for(self._opened, request)
        reply: p.Committed | p.Failed
        try:
            reply = task.run()
            self._uploads.committed(request.step, set_aside_after=request.supersede_after)
        except Exception as error:
            task.clean_up(error)
            reply = p.Failed(
                request.attempt,
                request.step,
                task.phase,
                f"{type(error).__name__}: {error}{self._uploads.held_text(error)}",
                traceback.format_exc(),
                task.missing_bytes(error),
            )
        if not self._note_end(task, request, reply):
            if isinstance(reply, p.Committed):
                self._record_commit(reply)
            else:
                self.record("failed", request.step, error=reply.message, after_trainer_death=True)
        faults.reach("worker.reply")
        self._reply(reply)

    def _note_end(
        self, task: PersistTask, request: p.Persist, reply: p.Committed | p.Failed
    ) -> bool:
        """Whether there is a trainer that will hear of it, and may fill the slot again."""
        with self._lock:
            is_heard = not self._is_orphaned()
            if is_heard and isinstance(reply, p.Committed):
                self._answered.append(reply)
            self.slots.ended(
                request,
                task.own_record,
                durable=isinstance(reply, p.Committed),
                given_back=is_heard,
            )
        return is_heard

    # ---- maintenance

    def _maintain(self, request: p.Maintenance) -> None:
        name = type(request).__name__
        try:
            steps = self._opened.maintain(request)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self._reply(p.Trouble(name, message, traceback.format_exc()))
        else:
            if isinstance(request, p.AddMark):
                self._uploads.marks_changed()
            self._reply(p.Done(name, steps))


def _tail(ops: FileOps, path: Path) -> bytes:
    """The newest lines of a log, those of the older generation included."""
    found = b""
    for one in (older_generation(path), path):
        with contextlib.suppress(OSError):
            file = ops.open_for_read(one)
            try:
                data = bytearray(min(file.size, _TAIL_BYTES))
                file.preadinto(memoryview(data), file.size - len(data))
            finally:
                file.close()
            found += data
    return found
