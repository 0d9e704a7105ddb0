"""The trainer's client of the persist worker.

Starts the worker, or takes over one that outlived its trainer, tells it about slots and layouts,
hands over snapshots, collects replies, notices its death and replaces it. Everything that the
worker was told is kept here as long as it matters, and a replacement is told all of it again. That
includes the snapshots in flight, since they are still in the trainer's arena. ``submit`` may be
called from any thread; everything else from the training thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from checkfreq import faults
from checkfreq.config import CFConfig
from checkfreq.errors import ConfigError, DirectoryBusyError, WorkerDiedError
from checkfreq.mirror.settings import Mirror
from checkfreq.notices.choice import watched
from checkfreq.persist import protocol as p
from checkfreq.persist.exits import LastWord
from checkfreq.persist.handover import Offer
from checkfreq.persist.launch import own_umask, worker_environment
from checkfreq.persist.lock import worker_of
from checkfreq.persist.offer import Snapshot
from checkfreq.persist.process import AdoptedWorker, ChildWorker, WorkerProcess, how_it_ended
from checkfreq.snapshot.arena import OfferedSlot
from checkfreq.types import FileSpec, Role

logger = logging.getLogger(__name__)

#: From the end of its socket, or from SIGKILL, to the end of a worker.
_EXIT_GRACE_S = 5.0
#: A start takes about 0.1 s; much longer where a network file system must serve the interpreter.
_START_GRACE_S = 60.0
#: The default of ``CFConfig.takeover_s`` with one rank.
_TAKEOVER_S = 60.0
_STDERR_TAIL_BYTES = 16 << 10
#: How often the wait for a worker's end looks how much time is left.
_LOOK_S = 1.0
#: The workers of all clients in this process.
_WORKERS: WeakSet[WorkerProcess] = WeakSet()


class _SlotRecord(NamedTuple):
    fd: int
    num_bytes: int


class WorkerClient:
    """One persist worker at a time: the first, or a replacement.

    ``on_notice`` is called with what the worker's watch thread says, whenever replies are read.
    """

    def __init__(
        self,
        chk_dir: Path,
        *,
        config: CFConfig,
        role: Role = Role(),
        on_notice: Callable[[p.Notice], object] = lambda notice: None,
    ) -> None:
        self._chk_dir = chk_dir.absolute()
        self._config = config
        self._role = role
        self._on_notice = on_notice
        self._watched = watched(config, rank=role.rank, environ=os.environ)
        self._lock = threading.Lock()
        self._slots: dict[int, _SlotRecord] = {}
        self._layouts: dict[int, tuple[FileSpec, ...]] = {}
        self._in_flight: dict[str, p.Persist] = {}
        self._asked: deque[p.Maintenance] = deque()
        self._opened = False
        #: Replies that came before ``Opened``.
        self._early: deque[p.Message] = deque()
        #: Where this directory is uploaded to; None on ranks that do not lead.
        self.mirror = _mirror_of(config, role)
        self._process: WorkerProcess | None = None
        self._channel: p.Channel | None = None
        self._stderr_fd = -1
        self._last_word = LastWord(self)
        #: What the worker said of its mirror while it was closing.
        self.final_reports: list[p.Mirrored] = []

    # ---- start and end

    def start(self) -> None:
        """Start a worker and ask it to lock the directory; does not wait for either."""
        with self._lock:
            self._start()

    def _start(self, *, keep_pending: bool = False) -> None:
        with contextlib.ExitStack() as on_failure:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            on_failure.callback(ours.close)
            stderr_fd = _memory_for_stderr()
            on_failure.callback(os.close, stderr_fd)
            with theirs:
                process = ChildWorker.start(
                    theirs.fileno(), stderr_fd=stderr_fd, nice=self._config.nice
                )
            on_failure.pop_all()
        self._begin(process, p.Channel(ours), stderr_fd)
        self._tell_to_open(keep_pending=keep_pending)
        self._tell_everything()

    def adopt(
        self, offer: Offer, slots: Iterable[OfferedSlot], in_flight: Iterable[Snapshot]
    ) -> None:
        """In place of ``start``: make the worker of a killed run this client's own.

        It has the ``slots``, whose descriptors must stay open as those of ``share_slot``, and the
        snapshots ``in_flight`` in its hands. Raises HandoverError if it is gone, and
        CorruptCheckpointError if it says of them what cannot be.
        """
        taken = list(in_flight)
        layouts = {one.slot: one.layout for one in taken}
        requests = {one.attempt: one.request(rank=self._role.rank) for one in taken}
        with self._lock, contextlib.ExitStack() as on_failure:
            stderr_fd = _memory_for_stderr()
            on_failure.callback(os.close, stderr_fd)
            adopted = offer.take(stderr_fd=stderr_fd)
            on_failure.pop_all()
            self._begin(AdoptedWorker(adopted.pid, adopted.pidfd), adopted.channel, stderr_fd)
            self._slots = {one.index: _SlotRecord(one.fd, one.num_bytes) for one in slots}
            self._layouts, self._in_flight = layouts, requests
            self._tell_to_open(keep_pending=len(self._role.group) > 1, is_adopted=True)

    def _begin(self, process: WorkerProcess, channel: p.Channel, stderr_fd: int) -> None:
        if self._process is not None:
            self._process.close()
        if self._stderr_fd >= 0:
            os.close(self._stderr_fd)
        self._process, self._channel, self._stderr_fd = process, channel, stderr_fd
        _WORKERS.add(process)
        self._last_word.through(channel)
        self._opened = False
        faults.set_peer(process.pid)

    @property
    def open_timeout_s(self) -> float:
        """How long opening may take: the previous run's worker may have to finish first."""
        return self._takeover_s + _START_GRACE_S

    def wait_opened(self) -> None:
        """Return once the worker holds the directory's lock.

        Raises DirectoryBusyError if another run keeps the lock for ``takeover_s``, ConfigError if
        the directory cannot be used, and WorkerDiedError if the worker ends first.
        """
        if not self.poll_opened(timeout_s=self.open_timeout_s):
            raise self._death("open")

    def poll_opened(self, *, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the directory's lock; returns ``has_opened``.

        Raises what ``wait_opened`` raises, except for the timeout.
        """
        deadline = time.monotonic() + timeout_s
        while not self._opened:
            reply = self._receive(max(0.0, deadline - time.monotonic()))
            match reply:
                case p.Opened():
                    self._opened = True
                case p.Waiting():
                    logger.warning("%s is locked by %s; waiting", self._chk_dir, reply.holder)
                case p.OpenFailed():
                    raise self._open_failure(reply)
                case None if self.is_alive():
                    return False
                case None:
                    raise self._death("open")
                case _:  # of an adopted worker, about what it had in its hands
                    self._answered(reply)
                    self._early.append(reply)
        return True

    def is_alive(self) -> bool:
        """True while the worker process runs."""
        return self._process is not None and self._process.is_alive()

    @property
    def has_opened(self) -> bool:
        """Whether the worker said that it holds the directory."""
        return self._opened

    @property
    def has_unanswered_requests(self) -> bool:
        """Whether maintenance was asked for (``ask``) that the worker has not answered.

        Persists do not count: see ``holds``.
        """
        return bool(self._asked)

    def replace(self) -> None:
        """Start another worker and tell it everything that the old one knew."""
        with self._lock:  # ``submit`` on another thread waits: the snapshot is sent once
            self.kill()
            # Other ranks may be writing parts, even of attempts that this rank has yet to hand
            # over: the new leader's worker must not sweep them away.
            self._start(keep_pending=len(self._role.group) > 1)

    def kill(self) -> None:
        """End the worker at once; idempotent."""
        if self._process is not None:
            self._process.kill()
            if not self._process.wait(_EXIT_GRACE_S):  # stuck in the kernel, on a disk that hangs
                logger.error(
                    "the persist worker %d was killed and has not ended", self._process.pid
                )
        if self._channel is not None:
            self._channel.close()

    def close(
        self,
        *,
        timeout_s: float,
        upload_for_s: float | None = None,
        left_s: Callable[[], float] = lambda: math.inf,
    ) -> bool:
        """Let the worker finish its requests and exit; False if it had to be killed.

        It may take ``timeout_s``, or less if ``left_s()`` says so meanwhile. ``upload_for_s``: see
        ``protocol.Close``.
        """
        if self._process is None or self._channel is None:
            return True
        with contextlib.suppress(p.ChannelClosedError):
            self._channel.send(p.Close(upload_for_s))
        self._last_word.cancel()
        clean = self._wait_for_end(timeout_s, left_s)
        self._take_final_replies()
        self.kill()
        os.close(self._stderr_fd)
        self._stderr_fd = -1
        if clean and (self._process.exit_code or self._asked):
            logger.error(
                "the persist worker %s; not carried out: %s",
                how_it_ended(self._process),
                list(self._asked),
            )
        self._process.close()
        self._process = None
        self._channel = None
        return clean

    def _wait_for_end(self, timeout_s: float, left_s: Callable[[], float]) -> bool:
        assert self._process is not None
        end_s = time.monotonic() + timeout_s
        while (now_left_s := min(end_s - time.monotonic(), left_s())) > 0:
            if self._process.wait(min(now_left_s, _LOOK_S)):
                return True
        return self._process.wait(0.0)

    def _take_final_replies(self) -> None:
        """Read the replies sent before the worker ended, and log what failed."""
        while (reply := self._early.popleft() if self._early else self._receive(0.0)) is not None:
            self._answered(reply)
            if isinstance(reply, p.Trouble | p.Failed):
                logger.error("while closing: %s\n%s", reply.message, reply.child_traceback)
            if isinstance(reply, p.Retaken):
                logger.error("while closing: %s", reply.message)
            if isinstance(reply, p.Mirrored):
                self.final_reports.append(reply)

    # ---- work

    def forget_slots(self) -> None:
        """The slots so far are being freed, none of them in use, and their descriptors closed."""
        self._slots.clear()
        self._layouts.clear()

    def share_slot(self, slot: int, *, fd: int, num_bytes: int) -> None:
        """Share a slot's memory with the worker.

        ``fd`` must stay open until ``forget_slots``: a replacement is sent it again.
        """
        self._slots[slot] = _SlotRecord(fd, num_bytes)
        self._tell(p.SlotMemory(slot, num_bytes), fd=fd)

    def lay_out_slot(self, slot: int, files: tuple[FileSpec, ...]) -> None:
        """Tell the worker a slot's layout, before the first snapshot with that layout."""
        self._layouts[slot] = files
        self._tell(p.SlotLayout(slot, files))

    def submit(self, request: p.Persist) -> None:
        """Hand over a complete snapshot. Any thread; ``poll`` reports a dead worker."""
        faults.reach("socket.send")
        with self._lock:
            self._in_flight[request.attempt] = request
            self._tell(request)

    def ask(self, request: p.Maintenance) -> None:
        """Request maintenance. Requests are carried out in order; ``poll`` returns the answer."""
        self._asked.append(request)
        self._tell(request)

    def prune_mirror(self, steps: tuple[int, ...], *, once: int) -> None:
        """Have steps removed from the mirror. Not answered; a later report asks again."""
        if steps:
            self._tell(p.PruneMirror(steps, once))

    def holds(self, attempt: str) -> bool:
        """Whether the attempt's snapshot was handed over and not answered yet."""
        with self._lock:
            return attempt in self._in_flight

    def poll(self, *, timeout_s: float = 0.0) -> p.Message | None:
        """Return the next reply, waiting at most ``timeout_s``; None if there is none.

        Raises WorkerDiedError once the worker is gone and its last reply was returned.
        """
        if self._early:
            return self._early.popleft()
        reply = self._receive(timeout_s)
        if reply is None:
            if self.is_alive():
                return None
            reply = self._receive(0.0)  # it may have replied between ``_receive`` and its end
            if reply is None:
                raise self._death("persist")
        self._answered(reply)
        return reply

    def _answered(self, reply: p.Message) -> None:
        """Drop what a replacement no longer needs to be told."""
        match reply:
            case p.Opened():
                self._opened = True
            case p.Committed() | p.Failed():
                faults.reach("socket.receive")
                with self._lock:
                    self._in_flight.pop(reply.attempt, None)
                    if isinstance(reply, p.Committed):
                        self._supersede_no_more()
            case p.Done() | p.Trouble() if self._asked:
                self._asked.popleft()  # answers come in the order of the requests

    def forget(self, attempt: str) -> None:
        """Do not hand this attempt's snapshot to a replacement."""
        with self._lock:
            self._in_flight.pop(attempt, None)

    # ---- inside

    def _supersede_no_more(self) -> None:
        """The later steps are set aside: a replacement must not set aside this run's own."""
        for attempt, request in self._in_flight.items():
            self._in_flight[attempt] = request._replace(supersede_after=None)

    @property
    def _takeover_s(self) -> float:
        """How long to wait for the lock: the previous worker may wait for parts of each slot."""
        return takeover_s(self._config, ranks=len(self._role.group))

    def _tell_to_open(self, *, keep_pending: bool, is_adopted: bool = False) -> None:
        config = self._config
        self._tell(
            p.Open(
                str(self._chk_dir),
                takeover_s=self._takeover_s,
                writer_threads=config.writer_threads,
                write_chunk_bytes=config.write_chunk_bytes,
                max_write_bytes_per_s=config.max_write_bytes_per_s,
                role=self._role,
                keep_pending=keep_pending,
                mirror=None if self.mirror is None else self.mirror.to_json(),
                keep_in_memory_s=config.keep_in_memory_s,
                full_copy_every=config.full_copy_every,
                is_tree=len(self._role.group) >= config.tree_from_ranks,
                nice=config.nice if is_adopted else None,
                environment=worker_environment() if is_adopted else None,
                umask=own_umask(),
            )
        )
        if self._watched.names:
            self._tell(p.Watch(*dataclasses.astuple(self._watched)))

    def _tell_everything(self) -> None:
        for slot, record in self._slots.items():
            self._tell(p.SlotMemory(slot, record.num_bytes), fd=record.fd)
        for slot, files in self._layouts.items():
            self._tell(p.SlotLayout(slot, files))
        # Requests first: they concern steps that were committed before those in flight.
        for request in [*self._asked, *self._in_flight.values()]:
            self._tell(request)

    def _tell(self, message: p.Message, *, fd: int | None = None) -> None:
        assert self._channel is not None, "the client is not started"
        with contextlib.suppress(p.ChannelClosedError):  # ``poll`` reports a dead worker
            self._channel.send(message, fd=fd)

    def _receive(self, timeout_s: float) -> p.Message | None:
        """The next reply; notices before it go to whoever listens."""
        assert self._channel is not None, "the client is not started"
        deadline_s = time.monotonic() + timeout_s
        try:
            while isinstance(reply := self._channel.receive(timeout_s=timeout_s), p.Notice):
                self._on_notice(reply)
                timeout_s = max(0.0, deadline_s - time.monotonic())
            return reply
        except p.ChannelClosedError:
            assert self._process is not None
            self._process.wait(_EXIT_GRACE_S)
            return None

    def _death(self, phase: str) -> WorkerDiedError:
        assert self._process is not None
        with self._lock:
            steps = sorted(request.step for request in self._in_flight.values())
        held = f" while it held step {', '.join(map(str, steps))}" if steps else ""
        return WorkerDiedError(
            f"the persist worker for {self._chk_dir} {how_it_ended(self._process)}{held}",
            step=steps[0] if steps else -1,
            phase=phase,
            child_traceback=self._stderr_tail(),
        )

    def _stderr_tail(self) -> str:
        size = os.fstat(self._stderr_fd).st_size
        start = max(0, size - _STDERR_TAIL_BYTES)
        return os.pread(self._stderr_fd, size - start, start).decode(errors="replace")

    def _open_failure(self, reply: p.OpenFailed) -> ConfigError:
        cannot = f"cannot use {self._chk_dir} as a checkpoint directory: {reply.message}. "
        if not reply.is_busy:
            return ConfigError(f"{cannot}Give each run a directory of its own, writable by it.")
        busy = DirectoryBusyError(
            f"{cannot}If that is an earlier start of this run, it has to end first: start this one "
            "again then, or raise CFConfig.takeover_s. Else give each run a directory of its own"
        )
        logger.error("%s", busy)  # an exit that nobody catches shows no traceback
        return busy


def takeover_s(config: CFConfig, *, ranks: int = 1) -> float:
    """How long to wait for the worker of a killed run of so many ranks."""
    if config.takeover_s is not None:
        return config.takeover_s
    return _TAKEOVER_S + (config.num_slots * config.rank_timeout_s if ranks > 1 else 0.0)


def require_no_other_manager(chk_dir: Path) -> None:
    """Raise ConfigError if a manager of this very process holds the directory: no wait would help.

    Called before a manager is made, so that a notebook's variable still holds the first one.
    """
    holder = worker_of(chk_dir)
    if any(worker.pid == holder and worker.is_alive() for worker in _WORKERS):
        raise ConfigError(
            f"a manager of this process has {chk_dir} open already (a notebook cell that ran "
            "again, perhaps): expected one manager per directory. Close that one with its close(), "
            "then run this again; or train on with it, without making another"
        )


def _memory_for_stderr() -> int:
    # Memory, not a pipe: the trainer reads it only after a death, and a full pipe blocks.
    fd = os.memfd_create("checkfreq-worker-stderr", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return fd


def _mirror_of(config: CFConfig, role: Role) -> Mirror | None:
    mirror = Mirror.of(config.mirror)
    if mirror is None or not role.leads:
        return None
    return mirror if role.shares_all else mirror.for_node(role.rank)
