"""The persist worker: ``main([SOCKET_FD, TRAINER_PIDFD, TRAINER_PID, NICE])``, see ``launch``.

The trainer starts it in a session of its own, and it ignores signals: it outlives a killed trainer
and finishes the snapshots it holds. It imports no torch and sees no accelerator.
The main thread receives messages and watches the trainer through a pidfd (a forked loader
process can keep the socket open, so the socket may never report end of file). The request thread
carries the requests out in order (`requests`); a third one asks when the run ends (`notices/`). No
other process writes checkpoints. With several ranks each has a worker, and only the leader's holds
the lock. After a trainer's death it may linger (`linger`), and become another one's worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from checkfreq import faults
from checkfreq.persist import outlived
from checkfreq.persist import protocol as p
from checkfreq.persist.linger import Ending, Lingering, Successor
from checkfreq.persist.pressure import MemoryPressure, first_to_go
from checkfreq.persist.requests import RequestHandler, Trainer

#: ``poll`` returns at once when there is a message or the trainer has ended: the timeout is only
#: there because every wait has one.
_POLL_S = 3600.0
#: Number of the system call ioprio_set(2), which the C library does not wrap, by machine.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PGRP = 2
_BEST_EFFORT = 2 << 13

#: What the request thread does next: a request and who asked, or anything else; None: it ends.
_Job = tuple[Trainer, p.Message] | Callable[[], None] | None
_Jobs = queue.SimpleQueue[_Job]


class Worker:
    """The main thread's part of a worker. ``nice``: its niceness while there is a trainer."""

    def __init__(self, trainer: Trainer, trainer_pidfd: int, *, nice: int) -> None:
        self._trainer = trainer
        self._pidfd = trainer_pidfd
        self._nice = nice
        self._handler = RequestHandler(trainer)
        self._jobs: _Jobs = queue.SimpleQueue()
        self._keep_until_s = 0.0

    def serve(self) -> bool:
        """Pass messages on until Close, or until the trainer is gone and no other comes.

        Returns once every request that was received is finished; False if an upload is still in
        progress although its time is up.
        """
        thread = threading.Thread(target=self._carry_out_all, name="checkfreq-persist")
        thread.start()
        close = self._receive_all()
        while close is None:
            self._trainer_died()
            successor = self._linger()
            if successor is None:
                break
            self._adopt(successor)
            close = self._receive_all()
        self._jobs.put(None)
        thread.join()
        return self._handler.finish(None if close is None else close.upload_for_s)

    # ---- with a trainer

    def _carry_out_all(self) -> None:
        """The request thread."""
        try:
            while (job := self._jobs.get()) is not None:
                if callable(job):
                    job()
                else:
                    self._handler.carry_out(*job)
        except BaseException:
            # A bug of ours: die visibly. The trainer reads the traceback and replaces this worker.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _receive_all(self) -> p.Close | None:
        """Queue messages as they come; returns Close, or None when the trainer is gone."""
        channel = self._trainer.channel
        while True:
            gone = self._pidfd in p.readable(channel.fileno(), self._pidfd, timeout_s=_POLL_S)
            # What a dead trainer had sent is still in the socket: read it before leaving.
            try:
                while (message := channel.receive(timeout_s=0)) is not None:
                    if isinstance(message, p.Close):
                        return message
                    self._heard(message)
            except p.ChannelClosedError:  # the kernel closes a dead trainer's socket first
                return None
            if gone:
                return None

    def _heard(self, message: p.Message) -> None:
        if isinstance(message, p.Watch):
            self._handler.watch(message)
            return
        if isinstance(message, p.KeepNothing):
            self._trainer.keeps = False
            return
        if isinstance(message, p.Persist):
            faults.reach("worker.receive")
        if isinstance(message, p.Open):
            self._nice = self._nice if message.nice is None else message.nice
            if message.environment is not None:
                _take_environment(message.environment)
            if message.umask is not None:
                os.umask(message.umask)
        self._handler.heard(message)
        self._jobs.put((self._trainer, message))

    # ---- without one

    def _trainer_died(self) -> None:
        """Finish as fast as possible: there is no training left to slow down."""
        self._handler.trainer_died()
        set_io_priority(level=0)
        _set_niceness(0)
        if not self._trainer.keeps:
            self._keep_until_s = 0.0
        elif self._trainer.opening is not None:  # else the time of the one before goes on
            self._keep_until_s = time.monotonic() + self._trainer.opening.keep_in_memory_s

    def _linger(self) -> Successor | None:
        """Keep the memory for another trainer; None when it is given up, or there is none."""
        opening, newest = self._handler.opening, self._handler.slots.newest()
        is_wanted = time.monotonic() < self._keep_until_s
        if opening is None or newest is None or not is_wanted:
            return None
        ours, theirs = socket.socketpair()
        with ours, theirs, _idle_between(theirs) as become_idle:
            ours.setblocking(False)
            theirs.setblocking(False)
            lingering = Lingering(
                Path(opening.chk_dir),
                self._handler.slots,
                opening.role,
                until_s=self._keep_until_s,
                pressure=MemoryPressure(self._handler.slots.num_bytes),
                wake_fd=ours.fileno(),
                look=lambda woken: _woken(woken, become_idle),
            )
            if not lingering.listen():
                return None
            step, num_bytes = newest[0], self._handler.slots.num_bytes
            self._handler.record("memory_kept", step, num_bytes=num_bytes)
            self._jobs.put(partial(self._let_go, self._trainer, theirs))
            end = lingering.run()
        if isinstance(end, Successor):
            return end
        if end not in (Ending.DIRECTORY, Ending.SOCKET):  # nothing new in what is being removed
            self._handler.record("memory_given_up", step, why=end.value)
        return None

    def _let_go(self, trainer: Trainer, wake: socket.socket) -> None:
        """The request thread, once nothing is left to write."""
        self._handler.let_go(trainer)
        with contextlib.suppress(OSError):  # the main thread does not wait for it any more
            wake.send(b"\0")

    def _adopt(self, successor: Successor) -> None:
        """Be an ordinary worker again, of another trainer."""
        os.close(self._pidfd)
        self._trainer.channel.close()
        self._pidfd = successor.pidfd
        self._trainer = Trainer(p.Channel(successor.sock), successor.pid)
        os.dup2(successor.stderr_fd, sys.stderr.fileno())
        os.close(successor.stderr_fd)
        faults.set_peer(successor.pid)
        set_io_priority(level=7)
        _set_niceness(self._nice)
        self._handler.adopt(self._trainer, in_flight=successor.in_flight)


@contextlib.contextmanager
def _idle_between(wake: socket.socket) -> Iterator[Callable[[], None]]:
    """Give a function to call once nothing is left to write: this process may be ended then.

    By a job manager, with SIGTERM, which is written to ``wake``, and by a kernel without memory. At
    the end of the block it is as before.
    """
    with contextlib.ExitStack() as stack:

        def become_idle() -> None:
            stack.enter_context(first_to_go())
            stack.callback(outlived.ignore)
            stack.callback(signal.set_wakeup_fd, -1)
            signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            signal.signal(signal.SIGTERM, lambda number, frame: None)

        yield become_idle


def _woken(data: bytes, become_idle: Callable[[], None]) -> Ending | None:
    if signal.SIGTERM in data:
        return Ending.SIGNAL
    become_idle()
    return None


def _take_environment(environment: Mapping[str, str]) -> None:
    """Credentials, and the job that the trainer belongs to, are found in the environment."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def set_io_priority(*, level: int) -> None:
    """Set the best-effort I/O class for all threads of this process.

    ``level`` is 0 (highest priority) to 7. It is set for the process group, which the worker
    leads: given a process id, Linux would set it for one thread. Does nothing on machines whose
    system call number is unknown.
    """
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PGRP, 0, _BEST_EFFORT | level)


def _set_niceness(nice: int) -> None:
    with contextlib.suppress(PermissionError):  # raising one's priority needs privileges
        os.setpriority(os.PRIO_PGRP, 0, nice)


def main(argv: list[str]) -> None:
    """Run the worker; returns when it was told to close, or is done after its trainer's end."""
    outlived.ignore()
    socket_fd, pidfd, trainer_pid, nice = (int(value) for value in argv)
    os.nice(nice)
    set_io_priority(level=7)
    faults.set_peer(trainer_pid)
    trainer = Trainer(p.Channel(socket.socket(fileno=socket_fd)), trainer_pid)
    # Above what the trainer started it with, since the trainer may be nice itself.
    worker = Worker(trainer, pidfd, nice=os.getpriority(os.PRIO_PROCESS, 0))
    if not worker.serve():
        os._exit(0)  # a request that hangs must not hold the exit up; its upload is resumed
