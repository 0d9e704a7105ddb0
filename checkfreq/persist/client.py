"""The trainer's handle on the persist worker.

Starts it, tells it about slots and layouts, hands over snapshots, collects replies, notices
its death and replaces it. What the worker must know is kept here until it is no longer
needed, so that a replacement can be told everything, the snapshots in flight included: they
still lie in the trainer's arena. ``submit`` may be called from any thread; everything else
from the training thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from checkfreq import faults
from checkfreq.config import CFConfig
from checkfreq.errors import ConfigError, WorkerDiedError
from checkfreq.persist import protocol as p
from checkfreq.persist.launch import worker_command, worker_environment
from checkfreq.types import FileSpec, Role

logger = logging.getLogger(__name__)

_EXIT_GRACE_S = 5.0
_START_GRACE_S = 60.0
_TAKEOVER_S = 60.0  # of a run of one rank
_STDERR_TAIL_BYTES = 16 << 10


class _SlotRecord(NamedTuple):
    fd: int
    num_bytes: int


class WorkerClient:
    """One persist worker and its replacement."""

    def __init__(self, chk_dir: Path, *, config: CFConfig, role: Role = Role()) -> None:
        self._chk_dir = chk_dir.absolute()
        self._config = config
        self._role = role
        self._lock = threading.Lock()
        self._slots: dict[int, _SlotRecord] = {}
        self._layouts: dict[int, tuple[FileSpec, ...]] = {}
        self._in_flight: dict[str, p.Persist] = {}
        self._asked: deque[p.Maintenance] = deque()
        self._opened = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: p.Channel | None = None
        self._stderr_fd = -1

    # ---- life

    def start(self) -> None:
        """Start a worker and have it lock the directory; returns without waiting."""
        with self._lock:
            self._start()

    def _start(self, *, keep_pending: bool = False) -> None:
        with contextlib.ExitStack() as on_failure:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            on_failure.callback(ours.close)
            stderr_fd = os.memfd_create("checkfreq-worker-stderr", os.MFD_CLOEXEC)
            on_failure.callback(os.close, stderr_fd)
            os.fchmod(stderr_fd, 0o600)
            with theirs:
                self._process = self._spawn(theirs.fileno(), stderr_fd)
            on_failure.pop_all()
        if self._stderr_fd >= 0:
            os.close(self._stderr_fd)
        self._stderr_fd = stderr_fd
        faults.set_peer(self._process.pid)
        self._channel = p.Channel(ours)
        self._opened = False
        self._tell_everything(keep_pending=keep_pending)

    @property
    def open_timeout_s(self) -> float:
        """How long opening may take: a predecessor's worker, and the start of this one."""
        return self._takeover_s + _START_GRACE_S

    def wait_opened(self) -> None:
        """Return once the worker holds the directory's lock.

        Raises ConfigError when another run keeps it for ``takeover_s``, or when the directory
        cannot be used; WorkerDiedError when the worker ends instead.
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
                    raise ConfigError(self._open_failure(reply))
                case None if self.is_alive():
                    return False
                case None:
                    raise self._death("open")
                case _:
                    raise AssertionError(f"unexpected reply before Opened: {reply}")
        return True

    def is_alive(self) -> bool:
        """True while the worker process runs."""
        return self._process is not None and self._process.poll() is None

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
        """Start another worker and tell it all that the old one knew."""
        with self._lock:  # a snapshot handed over meanwhile goes to the new worker, once
            self.kill()
            # Others may write parts, also of attempts that this rank has not handed over yet.
            self._start(keep_pending=len(self._role.group) > 1)

    def kill(self) -> None:
        """End the worker at once; idempotent."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            try:
                self._process.wait(_EXIT_GRACE_S)
            except subprocess.TimeoutExpired:  # stuck in the kernel, on a disk that hangs
                logger.error("the persist worker %d does not die", self._process.pid)
        if self._channel is not None:
            self._channel.close()

    def close(self, *, timeout_s: float) -> bool:
        """Let the worker finish what it was given and exit; False if it had to be killed."""
        if self._process is None or self._channel is None:
            return True
        with contextlib.suppress(p.ChannelClosedError):
            self._channel.send(p.Close())
        try:
            self._process.wait(timeout_s)
            clean = True
        except subprocess.TimeoutExpired:
            clean = False
        self._take_last_words()
        self.kill()
        os.close(self._stderr_fd)
        self._stderr_fd = -1
        if clean and (self._process.returncode != 0 or self._asked):
            logger.error(
                "the persist worker ended with exit code %s; not carried out: %s",
                self._process.returncode,
                list(self._asked),
            )
        self._process = None
        self._channel = None
        return clean

    def _take_last_words(self) -> None:
        """Replies sent before the worker ended; what failed is at least said."""
        while (reply := self._receive(0.0)) is not None:
            self._answered(reply)
            if isinstance(reply, p.Trouble | p.Failed):
                logger.error("while closing: %s\n%s", reply.message, reply.child_traceback)
            if isinstance(reply, p.Retaken):
                logger.error("while closing: %s", reply.message)

    # ---- work

    def forget_slots(self) -> None:
        """The slots so far are gone, none of them in use; their descriptors may be closed."""
        self._slots.clear()
        self._layouts.clear()

    def share_slot(self, slot: int, *, fd: int, num_bytes: int) -> None:
        """Tell which memory slot ``slot`` is; ``fd`` must stay open until told otherwise."""
        self._slots[slot] = _SlotRecord(fd, num_bytes)
        self._tell(p.SlotMemory(slot, num_bytes), fd=fd)

    def lay_out_slot(self, slot: int, files: tuple[FileSpec, ...]) -> None:
        """Tell what lies where in a slot, before the first snapshot that is laid out so."""
        self._layouts[slot] = files
        self._tell(p.SlotLayout(slot, files))

    def submit(self, request: p.Persist) -> None:
        """Hand over a complete snapshot. Any thread; a dead worker is noticed by ``poll``."""
        faults.reach("socket.send")
        with self._lock:
            self._in_flight[request.attempt] = request
            self._tell(request)

    def ask(self, request: p.Maintenance) -> None:
        """Request maintenance; carried out in order, the answer comes through ``poll``."""
        self._asked.append(request)
        self._tell(request)

    def holds(self, attempt: str) -> bool:
        """Whether a snapshot was handed over and has no answer yet."""
        with self._lock:
            return attempt in self._in_flight

    def poll(self, *, timeout_s: float = 0.0) -> p.Message | None:
        """Return the next reply, waiting at most ``timeout_s``; None if there is none.

        Raises WorkerDiedError once the worker is gone and its last reply was returned.
        """
        reply = self._receive(timeout_s)
        if reply is None and not self.is_alive():
            reply = self._receive(0.0)  # sent between our look and its end
            if reply is None:
                raise self._death("persist")
        self._answered(reply)
        return reply

    def _answered(self, reply: p.Message | None) -> None:
        """Forget what a replacement need not be told any more."""
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
        """Do not hand this snapshot to a replacement."""
        with self._lock:
            self._in_flight.pop(attempt, None)

    # ---- inside

    def _supersede_no_more(self) -> None:
        """The later steps are set aside: a replacement must not do it again."""
        for attempt, request in self._in_flight.items():
            self._in_flight[attempt] = dataclasses.replace(request, supersede_after=None)

    def _spawn(self, socket_fd: int, stderr_fd: int) -> subprocess.Popen[bytes]:
        pidfd = os.pidfd_open(os.getpid())
        try:
            return self._popen(socket_fd, pidfd, stderr_fd)
        finally:
            os.close(pidfd)

    def _popen(self, socket_fd: int, pidfd: int, stderr_fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            worker_command((socket_fd, pidfd, os.getpid(), self._config.nice)),
            pass_fds=(socket_fd, pidfd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # an inherited pipe would outlive the trainer with us
            stderr=stderr_fd,
            start_new_session=True,
            env=worker_environment(),
        )

    @property
    def _takeover_s(self) -> float:
        """A predecessor's worker may wait for parts of each snapshot before it lets go."""
        config = self._config
        if config.takeover_s is not None:
            return config.takeover_s
        waits_s = config.num_slots * config.rank_timeout_s
        return _TAKEOVER_S + (waits_s if len(self._role.group) > 1 else 0.0)

    def _tell_everything(self, *, keep_pending: bool) -> None:
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
            )
        )
        for slot, record in self._slots.items():
            self._tell(p.SlotMemory(slot, record.num_bytes), fd=record.fd)
        for slot, files in self._layouts.items():
            self._tell(p.SlotLayout(slot, files))
        # What was asked concerns steps committed before those in flight.
        for request in [*self._asked, *self._in_flight.values()]:
            self._tell(request)

    def _tell(self, message: p.Message, *, fd: int | None = None) -> None:
        assert self._channel is not None, "the client is not started"
        with contextlib.suppress(p.ChannelClosedError):  # its death is reported by poll()
            self._channel.send(message, fd=fd)

    def _receive(self, timeout_s: float) -> p.Message | None:
        assert self._channel is not None, "the client is not started"
        try:
            return self._channel.receive(timeout_s=timeout_s)
        except p.ChannelClosedError:
            assert self._process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_GRACE_S)
            return None

    def _death(self, phase: str) -> WorkerDiedError:
        assert self._process is not None
        with self._lock:
            steps = sorted(request.step for request in self._in_flight.values())
        code = self._process.poll()
        how = "stopped answering" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        held = f" while it held step {', '.join(map(str, steps))}" if steps else ""
        return WorkerDiedError(
            f"the persist worker for {self._chk_dir} {how}{held}",
            step=steps[0] if steps else -1,
            phase=phase,
            child_traceback=self._stderr_tail(),
        )

    def _stderr_tail(self) -> str:
        size = os.fstat(self._stderr_fd).st_size
        start = max(0, size - _STDERR_TAIL_BYTES)
        return os.pread(self._stderr_fd, size - start, start).decode(errors="replace")

    def _open_failure(self, reply: p.OpenFailed) -> str:
        return (
            f"cannot use {self._chk_dir} as a checkpoint directory: {reply.message}. "
            "Give each run a directory of its own, writable by it; if the previous run is "
            "still saving, wait for it or raise CFConfig.takeover_s."
        )
