"""The persist worker: ``python -m checkfreq.persist.worker SOCKET_FD TRAINER_PIDFD TRAINER_PID``.

Started once by the trainer, in its own session, with SIGINT and SIGTERM ignored, so that it
outlives a killed trainer and finishes the snapshots it holds. Imports no torch and never sees
an accelerator. The main thread routes messages and watches the trainer through a pidfd (a
forked loader process can keep the socket open, so its end of file proves nothing); one other
thread carries the requests out in order. It alone writes to the checkpoint directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from checkfreq import faults
from checkfreq.events import Event, EventLog
from checkfreq.persist import protocol as p
from checkfreq.persist.lock import DirectoryLock, LockTimeoutError
from checkfreq.persist.writer import RateLimiter, SnapshotWriter, WriteResult
from checkfreq.store.manifest import Manifest
from checkfreq.store.store import CheckpointStore, Pending
from checkfreq.types import FileSpec

_POLL_S = 3600.0
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PGRP = 2
_BEST_EFFORT = 2 << 13
#: Room left on the disk beyond a checkpoint's own bytes: manifest, pointer, events.
_SPARE_BYTES = 4 << 20


class Desk:
    """Carries out requests, in order, on one thread; owns store, lock, slots and layouts."""

    def __init__(self, channel: p.Channel, *, trainer_pid: int) -> None:
        self._channel = channel
        self._trainer_pid = trainer_pid
        self._slots: dict[int, mmap.mmap] = {}
        self._layouts: dict[int, tuple[FileSpec, ...]] = {}
        self.trainer_gone = threading.Event()
        #: A commit of this worker has set the later steps aside. Snapshots that were handed over
        #: before the trainer knew ask for it again, and would set aside this run's own steps.
        self.has_superseded = False
        self._limiter = RateLimiter(None)

    def carry_out(self, request: p.Message) -> None:
        """Do one request and reply; only an unexpected bug raises."""
        match request:
            case p.Open():
                self._open(request)
            case p.SlotMemory():
                self._map_slot(request)
            case p.SlotLayout():
                self._layouts[request.slot] = request.files
            case p.Persist():
                self._persist(request)
            case p.Prune() | p.AddMark() | p.Quarantine():
                self._maintain(request)
            case _:
                raise AssertionError(f"not a request: {request}")

    def hurry(self) -> None:
        """The trainer is gone: nobody is slowed down any more, so finish fast."""
        self.trainer_gone.set()
        self._limiter.lift()
        set_io_priority(level=0)
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PGRP, 0, 0)

    def _reply(self, message: p.Message) -> None:
        with contextlib.suppress(p.ChannelClosedError):  # a dead trainer needs no answer
            self._channel.send(message)

    # ---- opening

    def _open(self, request: p.Open) -> None:
        try:
            self._take_over(request)
        except (OSError, LockTimeoutError) as error:
            self._reply(p.OpenFailed(str(error), traceback.format_exc()))
            return
        self._limiter = RateLimiter(
            None if self.trainer_gone.is_set() else request.max_write_bytes_per_s
        )
        self._writer = SnapshotWriter(
            num_threads=request.writer_threads,
            chunk_bytes=request.write_chunk_bytes,
            limiter=self._limiter,
        )
        self._reply(p.Opened(os.getpid()))

    def _take_over(self, request: p.Open) -> None:
        root = Path(request.chk_dir)
        root.mkdir(parents=True, exist_ok=True)
        self._lock = DirectoryLock(root)
        self._lock.acquire(
            timeout_s=request.takeover_s,
            owner_pid=self._trainer_pid,
            on_wait=lambda holder: self._reply(p.Waiting(holder)),
            give_up=self.trainer_gone.wait,
        )
        self._store = CheckpointStore(root)
        self._store.open()
        self._events = EventLog(root / "events.jsonl")

    def _map_slot(self, request: p.SlotMemory) -> None:
        fd = self._channel.take_fd()
        try:
            self._slots[request.slot] = mmap.mmap(fd, request.num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)

    # ---- persisting

    def _persist(self, request: p.Persist) -> None:
        attempt = _Attempt(self, request)
        reply: p.Committed | p.Failed
        try:
            reply = attempt.run()
        except Exception as error:
            attempt.clean_up()
            reply = p.Failed(
                request.attempt,
                request.step,
                attempt.phase,
                f"{type(error).__name__}: {error}",
                traceback.format_exc(),
            )
        if self.trainer_gone.is_set():
            self._record_alone(request, reply)
        faults.reach("worker.reply")
        self._reply(reply)

    def _record_alone(self, request: p.Persist, reply: p.Committed | p.Failed) -> None:
        kind = "committed" if isinstance(reply, p.Committed) else "failed"
        self._events.append(Event(kind, request.step, {"after_trainer_death": True}))

    # ---- maintenance

    def _maintain(self, request: p.Prune | p.AddMark | p.Quarantine) -> None:
        name = type(request).__name__
        try:
            steps = self.maintain(request)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self._reply(p.Trouble(name, message, traceback.format_exc()))
        else:
            self._reply(p.Done(name, steps))

    def maintain(self, request: p.Prune | p.AddMark | p.Quarantine) -> tuple[int, ...]:
        """Prune, mark or quarantine; returns the steps concerned."""
        if not self._lock.is_held():
            raise PermissionError("the lock on the checkpoint directory was lost")
        match request:
            case p.Prune():
                return tuple(self._store.prune(request.steps))
            case p.AddMark():
                self._store.add_mark(
                    request.step, keep=request.keep or None, metrics=request.metrics
                )
            case p.Quarantine():
                self._store.quarantine(request.step, request.reason)
        return (request.step,)


class _Attempt:
    """One snapshot on its way to a checkpoint; ``phase`` tells where it stands."""

    def __init__(self, desk: Desk, request: p.Persist) -> None:
        self._desk = desk
        self._request = request
        self._pending: Pending | None = None
        self.phase = "prepare"

    def run(self) -> p.Committed:
        start_s = time.perf_counter()
        request, store = self._request, self._desk._store
        files = self._desk._layouts[request.slot]
        num_bytes = sum(file.num_bytes for file in files)
        self.phase = "begin"
        self._pending = store.begin(
            request.step, attempt=request.attempt, num_bytes=num_bytes + _SPARE_BYTES
        )
        written = self._write(self._pending, files)
        write_s = time.perf_counter() - start_s
        self.phase = "commit"
        if not self._desk._lock.is_held():
            raise PermissionError("the lock on the checkpoint directory was lost; not committing")
        after = None if self._desk.has_superseded else request.supersede_after
        result = store.commit(self._pending, self._manifest(written), supersede_after=after)
        ended_s = time.perf_counter()
        self._desk.has_superseded = self._desk.has_superseded or after is not None
        warning = self._add_marks()
        return p.Committed(
            attempt=request.attempt,
            step=request.step,
            num_bytes=num_bytes,
            write_s=write_s,
            persist_s=ended_s - start_s,
            ended_s=ended_s,
            direct=written.direct,
            kept_existing=result.kept_existing,
            warning=warning,
        )

    def _write(self, pending: Pending, files: tuple[FileSpec, ...]) -> WriteResult:
        self.phase = "write"
        payloads = [pending.create_payload(file.name, file.num_bytes) for file in files]
        try:
            with memoryview(self._desk._slots[self._request.slot]) as slot:
                written = self._desk._writer.write(files, slot, payloads)
            self.phase = "sync"
            for file, payload in zip(files, payloads, strict=True):
                pending.finish_payload(payload, file.num_bytes)
        finally:
            pending.close()
        return written

    def _manifest(self, written: WriteResult) -> Manifest:
        request = self._request
        return Manifest(
            step=request.step,
            attempt=request.attempt,
            world=request.world,
            created_unix_s=time.time(),
            versions=request.versions,
            files=written.files,
            objects=request.objects,
        )

    def _add_marks(self) -> str:
        """Store what came with the request; returns what went wrong: the step is committed."""
        request = self._request
        if not (request.keep or request.metrics):
            return ""
        try:
            self._desk.maintain(p.AddMark(request.step, request.keep, request.metrics))
        except Exception as error:
            return f"its pin or metrics were not stored: {type(error).__name__}: {error}"
        return ""

    def clean_up(self) -> None:
        if self._pending is not None:
            with contextlib.suppress(OSError):  # the disk may be gone; open() cleans up later
                self._desk._store.abort(self._pending)


def set_io_priority(*, level: int) -> None:
    """Best-effort I/O class, ``level`` 0 (first) to 7 (last), for all threads of this process.

    The worker leads its own process group: a process id would mean one thread. Ignored where
    the call's number is unknown.
    """
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PGRP, 0, _BEST_EFFORT | level)


def serve(channel: p.Channel, trainer_pidfd: int, desk: Desk) -> None:
    """Route messages to the desk until Close, or until the trainer is gone."""
    requests: queue.SimpleQueue[p.Message | None] = queue.SimpleQueue()
    clerk = threading.Thread(target=_work, args=(desk, requests), name="checkfreq-persist")
    clerk.start()
    was_dismissed = _route(channel, trainer_pidfd, requests)
    if not was_dismissed:
        desk.hurry()
    requests.put(None)
    clerk.join()


def _work(desk: Desk, requests: queue.SimpleQueue[p.Message | None]) -> None:
    try:
        while (request := requests.get()) is not None:
            desk.carry_out(request)
    except BaseException:
        # A bug of ours: die visibly. The trainer reads the traceback and starts another worker.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _route(
    channel: p.Channel, trainer_pidfd: int, requests: queue.SimpleQueue[p.Message | None]
) -> bool:
    """Take messages in; True at Close, False when the trainer is gone."""
    while True:
        gone = trainer_pidfd in p.readable(channel.fileno(), trainer_pidfd, timeout_s=_POLL_S)
        # A dead trainer's last words are still in the socket: take them before leaving.
        try:
            while (message := channel.receive(timeout_s=0)) is not None:
                if isinstance(message, p.Close):
                    return True
                if isinstance(message, p.Persist):
                    faults.reach("worker.receive")
                requests.put(message)
        except p.ChannelClosedError:  # the kernel closes a dead trainer's socket first
            return False
        if gone:
            return False


def main(argv: list[str]) -> None:
    """Entry point of the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    socket_fd, pidfd, trainer_pid, nice = (int(value) for value in argv)
    os.nice(nice)
    set_io_priority(level=7)
    faults.set_peer(trainer_pid)
    channel = p.Channel(socket.socket(fileno=socket_fd))
    serve(channel, pidfd, Desk(channel, trainer_pid=trainer_pid))


if __name__ == "__main__":
    main(sys.argv[1:])
