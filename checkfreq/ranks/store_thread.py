"""Calls to the store of torch.distributed, made in a separate thread.

A call to a store whose host process is stopped, or whose node is lost, never returns: it keeps no
deadline, and the thread that made it handles no signal. So the training thread has this thread
make the calls and waits outside, where it can give up and handle signals. At any time at most one
of the two threads is doing anything.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = ["SilentStore", "StoreThread"]

T = TypeVar("T")

#: A call keeps its own deadline; if it has not returned so long after that, it is stuck.
_GRACE_S = 2.0
#: How often to look whether the deadline was brought forward by a stop signal.
_LOOK_S = 0.1
#: How long the thread may take to end once nothing blocks it.
_END_S = 5.0


class SilentStore(Exception):
    """The store did not answer in time, and is not asked again."""


class StoreThread:
    """Runs calls one after the other, until one is stuck: that is the last.

    The thread starts when it is first needed and ends with ``stop``. It is a daemon: it does not
    keep the process from exiting.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._port: int | None = None
        self._others: set[int] = set()
        self._own: set[int] | None = None
        self._is_stuck = False

    def clone(self, store: Any, *, timeout_s: float) -> Any:
        """A connection of its own to the same store, for this thread alone."""
        self._port = _port_of(store)
        self._others = _connections(self._port)
        cloned = self.call(lambda is_wanted: store.clone(), patience_s=lambda: timeout_s)
        self._own = _connections(self._port) - self._others
        return cloned

    def call(
        self, action: Callable[[Callable[[], bool]], T], *, patience_s: Callable[[], float]
    ) -> T:
        """Run ``action`` in the thread; returns its result or raises its error.

        ``action`` must return by itself after ``patience_s()`` seconds, or once the function it is
        passed returns False: the wait was interrupted. Raises SilentStore if it does neither.
        """
        if self._is_stuck:
            raise SilentStore("it did not answer before")
        task = _Task(action)
        self._start()
        self._tasks.put(task)
        began_s = time.monotonic()
        try:
            while not task.is_over.wait(_LOOK_S):
                waited_s = time.monotonic() - began_s
                if waited_s >= patience_s() + _GRACE_S:
                    self._give_up()
                    raise SilentStore(f"it has not answered within {waited_s:.0f} s")
        finally:
            task.is_wanted = False
        return task.result()

    def stop(self) -> None:
        """End the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            thread.join(0.0 if self._is_stuck else _END_S)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._tasks,), name="checkfreq-store", daemon=True
            )
            self._thread.start()

    def _give_up(self) -> None:
        """Make the stuck call fail by shutting its connection down.

        It must not stay stuck: a call that returned while the interpreter shuts down would unwind
        C++ frames in a thread that Python has ended, which aborts the process.
        """
        self._is_stuck = True
        own = _connections(self._port) - self._others if self._own is None else self._own
        for number in own & _connections(self._port):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        if own and self._thread is not None:
            self._tasks.put(None)
            self._thread.join(_END_S)


class _Task(Generic[T]):
    """A call, and its result or error."""

    def __init__(self, action: Callable[[Callable[[], bool]], T]) -> None:
        self._action = action
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.is_over = threading.Event()
        self.is_wanted = True

    def do(self) -> None:
        try:
            self._results.append(self._action(lambda: self.is_wanted))
        except BaseException as error:  # of any kind: it is raised again in the caller's thread
            self._error = error
        self.is_over.set()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results[0]


def _work(tasks: SimpleQueue[_Task[Any] | None]) -> None:
    while (task := tasks.get()) is not None:
        task.do()


def _port_of(store: Any) -> int | None:
    """The port of a TCPStore below any prefixes; None for another kind of store."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return getattr(store, "port", None)


def _connections(port: int | None) -> set[int]:
    """The descriptors of this process's connections to ``port``."""
    if port is None:
        return set()
    return {number for number in map(int, os.listdir("/proc/self/fd")) if _leads_to(port, number)}


def _leads_to(port: int, number: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        with socket.socket(fileno=os.dup(number)) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            return is_tcp and connection.getpeername()[1] == port
    except OSError:  # closed meanwhile, or not connected
        return False
