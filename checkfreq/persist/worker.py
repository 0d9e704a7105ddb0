"""The persist worker: ``main([SOCKET_FD, TRAINER_PIDFD, TRAINER_PID, NICE])``, see ``launch``.

The trainer starts it in a session of its own, and it ignores signals: it outlives a killed trainer
and finishes the snapshots it holds. It imports no torch and sees no accelerator.
The main thread receives messages and watches the trainer through a pidfd (a forked loader
process can keep the socket open, so the socket may never report end of file). The request thread
carries the requests out in order; a third one asks when the run ends (`notices/`). No other process
writes checkpoints. With several ranks each has a worker, and only the leader's holds the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import queue
import socket
import sys
import threading
import traceback
from pathlib import Path

from checkfreq import faults
from checkfreq.events import Event, EventLog
from checkfreq.mirror.identity import run_identity
from checkfreq.mirror.report import MirrorReport, State
from checkfreq.mirror.service import MirrorService
from checkfreq.mirror.settings import Mirror
from checkfreq.notices.choice import Watched, sources
from checkfreq.notices.watch import News, NoticeWatch
from checkfreq.persist import outlived
from checkfreq.persist import protocol as p
from checkfreq.persist.commit import OpenDirectory, task_for
from checkfreq.persist.guard import DirectoryGuard
from checkfreq.persist.lock import DirectoryLock, LockTimeoutError
from checkfreq.persist.writer import RateLimiter, SnapshotWriter
from checkfreq.store.joint import JointStore

#: ``poll`` returns at once when there is a message or the trainer has ended: the timeout is only
#: there because every wait has one.
_POLL_S = 3600.0
#: Number of the system call ioprio_set(2), which the C library does not wrap, by machine.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PGRP = 2
_BEST_EFFORT = 2 << 13


class RequestHandler:
    """Carries out requests, in order, on the request thread.

    ``_directory`` is set by ``Open``, which comes first. ``trainer_died`` is called on the main
    thread.
    """

    def __init__(self, channel: p.Channel, *, trainer_pid: int) -> None:
        self._channel = channel
        self._trainer_pid = trainer_pid
        self._events = EventLog(Path(), None)
        self._is_refused = False
        self.trainer_gone = threading.Event()
        self._limiter = RateLimiter(None)
        self._mirror: MirrorService | None = None
        self._upload_for_s = 0.0

    def carry_out(self, request: p.Message) -> None:
        """Do one request and reply; only an unexpected bug raises."""
        if self._is_refused:
            return  # the trainer was told, and will end this process
        match request:
            case p.Open():
                self._open(request)
            case p.SlotMemory():
                self._map_slot(request)
            case p.SlotLayout():
                self._directory.layouts[request.slot] = request.files
            case p.Persist():
                self._persist(request)
            case p.Prune() | p.AddMark() | p.Quarantine() | p.Confirm() | p.TellFailure():
                self._maintain(request)
            case p.PruneMirror():
                if self._mirror is not None:
                    self._mirror.remove(request.steps)
            case _:
                raise AssertionError(f"not a request: {request}")

    def watch(self, request: p.Watch) -> None:
        """Start asking when the run ends (called on the main thread): opening may take long."""
        asked = Watched(request.names, request.deadline_unix_s, request.metadata_url)
        NoticeWatch(sources(asked, environ=os.environ), tell=self._tell_news).start()

    def _tell_news(self, news: News) -> None:
        """Called on the watch thread, which ends with the channel."""
        ends = news.ends
        if ends is None:
            self._channel.send(p.NoticeGone(news.source))
        else:
            self._channel.send(p.NoticeSeen(news.source, ends.why, ends.at_unix_s, news.at_s))

    def trainer_died(self) -> None:
        """Finish as fast as possible: there is no training left to slow down."""
        self.trainer_gone.set()
        self._limiter.lift()
        set_io_priority(level=0)
        with contextlib.suppress(PermissionError):  # raising one's priority needs privileges
            os.setpriority(os.PRIO_PGRP, 0, 0)

    def _reply(self, message: p.Message) -> None:
        with contextlib.suppress(p.ChannelClosedError):  # a dead trainer needs no answer
            self._channel.send(message)

    # ---- opening

    def _open(self, request: p.Open) -> None:
        try:
            store, lock = self._take_over(request)
        except (OSError, LockTimeoutError) as error:
            self._is_refused = True
            self._reply(p.OpenFailed(str(error), traceback.format_exc()))
            return
        self._limiter = RateLimiter(
            None if self.trainer_gone.is_set() else request.max_write_bytes_per_s
        )
        writer = SnapshotWriter(
            num_threads=request.writer_threads,
            chunk_bytes=request.write_chunk_bytes,
            limiter=self._limiter,
        )
        guard = None if lock is None else self._guard(store, lock, request)
        self._directory = OpenDirectory(
            request.role, store, writer, lock, guard, self.trainer_gone.is_set
        )
        self._reply(p.Opened(os.getpid()))
        if request.mirror is not None and request.role.leads:
            self._start_mirror(Mirror.from_json(request.mirror), store)

    def _take_over(self, request: p.Open) -> tuple[JointStore, DirectoryLock | None]:
        """The store, and the leader's lock. A member takes the directory as it finds it.

        Only the leader's worker cleans up what an interrupted run left.
        """
        root = Path(request.chk_dir)
        store = JointStore(root)
        store.make()
        if not request.role.leads:
            return store, None
        lock = DirectoryLock(root)
        lock.acquire(
            timeout_s=request.takeover_s,
            owner_pid=self._trainer_pid,
            on_wait=lambda holder: self._reply(p.Waiting(holder)),
            give_up=self.trainer_gone.wait,
        )
        store.open(keep_pending=request.keep_pending)
        self._events = EventLog(root / "events.jsonl", store.ops)
        return store, lock

    def _guard(self, store: JointStore, lock: DirectoryLock, request: p.Open) -> DirectoryGuard:
        return DirectoryGuard(
            store,
            lock,
            owner_pid=self._trainer_pid,
            shares=len(request.role.group) > 1,
            on_retaken=lambda message, steps: self._reply(p.Retaken(message, steps)),
        )

    # ---- the mirror

    def _start_mirror(self, mirror: Mirror, store: JointStore) -> None:
        """Upload from now on what is committed. An earlier worker may still be doing so."""
        try:
            run = run_identity(store)
        except OSError as error:
            self._reply(p.Mirrored(MirrorReport(State.ENDED, problem=str(error)).to_json()))
            return
        lock = DirectoryLock(store.root, name=".mirror.lock")
        self._upload_for_s = mirror.wait_on_close_s
        self._mirror = MirrorService(
            mirror,
            store,
            run=run,
            report=self._report,
            try_lock=lambda: lock.try_now(owner_pid=self._trainer_pid),
        )
        self._directory.held = self._mirror.held
        self._mirror.start()

    def _report(self, report: MirrorReport) -> None:
        """On the mirror's thread."""
        if self.trainer_gone.is_set() and report.state is State.IDLE and report.step is not None:
            self._events.append(Event("uploaded", report.step, {"after_trainer_death": True}))
        self._reply(p.Mirrored(report.to_json()))

    def finish(self, upload_for_s: float | None) -> bool:
        """Release the directory, then upload its newest checkpoint; False if that takes too long.

        The next run may use the directory meanwhile: its worker uploads once this one is done.
        """
        if self._mirror is None:
            return True
        if self._directory.lock is not None:
            self._directory.lock.release()
        return self._mirror.finish(self._upload_for_s if upload_for_s is None else upload_for_s)

    def _map_slot(self, request: p.SlotMemory) -> None:
        fd = self._channel.take_fd()
        try:
            self._directory.slots[request.slot] = mmap.mmap(
                fd, request.num_bytes, prot=mmap.PROT_READ
            )
        finally:
            os.close(fd)

    # ---- persisting

    def _persist(self, request: p.Persist) -> None:
        task = task_for(self._directory, request)
        reply: p.Committed | p.Failed
        try:
            reply = task.run()
            self._mirror_step(request)
        except Exception as error:
            task.clean_up(error)
            reply = p.Failed(
                request.attempt,
                request.step,
                task.phase,
                f"{type(error).__name__}: {error}{self._held_text(error)}",
                traceback.format_exc(),
                task.missing_bytes(error),
            )
        if self.trainer_gone.is_set():
            self._record_event(request, reply)
        faults.reach("worker.reply")
        self._reply(reply)

    def _mirror_step(self, request: p.Persist) -> None:
        if self._mirror is not None:
            self._mirror.committed(request.step, set_aside_after=request.supersede_after)

    def _held_text(self, error: Exception) -> str:
        """Where the disk is full: what is on it only because the mirror has not got it yet."""
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        held = sorted(self._mirror.held()) if is_full and self._mirror is not None else []
        named = ", ".join(map(str, held))
        return f" (step(s) {named} are kept on disk until the mirror has them)" if held else ""

    def _record_event(self, request: p.Persist, reply: p.Committed | p.Failed) -> None:
        """The trainer writes these events, while it lives."""
        kind = "committed" if isinstance(reply, p.Committed) else "failed"
        self._events.append(Event(kind, request.step, {"after_trainer_death": True}))

    # ---- maintenance

    def _maintain(self, request: p.Maintenance) -> None:
        name = type(request).__name__
        try:
            steps = self._directory.maintain(request)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self._reply(p.Trouble(name, message, traceback.format_exc()))
        else:
            if isinstance(request, p.AddMark) and self._mirror is not None:
                self._mirror.marks_changed()
            self._reply(p.Done(name, steps))


def set_io_priority(*, level: int) -> None:
    """Set the best-effort I/O class for all threads of this process.

    ``level`` is 0 (highest priority) to 7. It is set for the process group, which the worker
    leads: given a process id, Linux would set it for one thread. Does nothing on machines whose
    system call number is unknown.
    """
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PGRP, 0, _BEST_EFFORT | level)


def serve(channel: p.Channel, trainer_pidfd: int, handler: RequestHandler) -> bool:
    """Pass messages to the handler until Close, or until the trainer is gone.

    Returns once the handler has finished every request that was received; False if an upload is
    still in progress although its time is up.
    """
    requests: queue.SimpleQueue[p.Message | None] = queue.SimpleQueue()
    thread = threading.Thread(
        target=_carry_out_all, args=(handler, requests), name="checkfreq-persist"
    )
    thread.start()
    close = _receive_all(channel, trainer_pidfd, requests, handler)
    if close is None:
        handler.trainer_died()
    requests.put(None)
    thread.join()
    return handler.finish(None if close is None else close.upload_for_s)


def _carry_out_all(handler: RequestHandler, requests: queue.SimpleQueue[p.Message | None]) -> None:
    try:
        while (request := requests.get()) is not None:
            handler.carry_out(request)
    except BaseException:
        # A bug of ours: die visibly. The trainer reads the traceback and replaces this worker.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _receive_all(
    channel: p.Channel,
    trainer_pidfd: int,
    requests: queue.SimpleQueue[p.Message | None],
    handler: RequestHandler,
) -> p.Close | None:
    """Queue messages as they come; returns Close, or None when the trainer is gone."""
    while True:
        gone = trainer_pidfd in p.readable(channel.fileno(), trainer_pidfd, timeout_s=_POLL_S)
        # What a dead trainer had sent is still in the socket: read it before leaving.
        try:
            while (message := channel.receive(timeout_s=0)) is not None:
                if isinstance(message, p.Close):
                    return message
                if isinstance(message, p.Watch):
                    handler.watch(message)
                    continue
                if isinstance(message, p.Persist):
                    faults.reach("worker.receive")
                requests.put(message)
        except p.ChannelClosedError:  # the kernel closes a dead trainer's socket first
            return None
        if gone:
            return None


def main(argv: list[str]) -> None:
    """Run the worker; returns when it was told to close, or is done after its trainer's end."""
    outlived.ignore()
    socket_fd, pidfd, trainer_pid, nice = (int(value) for value in argv)
    os.nice(nice)
    set_io_priority(level=7)
    faults.set_peer(trainer_pid)
    channel = p.Channel(socket.socket(fileno=socket_fd))
    if not serve(channel, pidfd, RequestHandler(channel, trainer_pid=trainer_pid)):
        os._exit(0)  # a request that hangs must not hold the exit up; its upload is resumed
