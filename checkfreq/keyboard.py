"""Ctrl-C, which is held back inside our calls and raised as they return.

An interrupt is raised between any two bytecodes. In the middle of a boundary it would leave a
snapshot that nobody waits for, or a request without its answer; a notebook, where Ctrl-C is caught
and training goes on, meets that soon. So while a call of ours runs in the main thread, the handler
of SIGINT only takes note. One that comes 5 s or more after the first is raised at once: a call may
wait for a disk.

A notebook sets Python's handler before each cell. `Keyboard.listen` therefore looks anew.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: How long an interrupt is held back at most, if another one follows.
_PATIENCE_S = 5.0


class Keyboard:
    """SIGINT in this process, whose handler is ours while anybody is attached.

    As a context, it holds an interrupt back until the end of the outermost ``with`` block.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._main: int | None = None
        self._pid = 0
        self._listeners = 0
        self._held_since_s: float | None = None
        self._previous: Any = None
        #: How many calls are under way, one in another, in which interrupts are held back.
        self._depth = 0

    def attach(self) -> None:
        """Listen until `detach` was called as often."""
        if self._pid != os.getpid():  # forked, in the midst of a call perhaps
            self._main, self._pid = threading.main_thread().ident, os.getpid()
            self._listeners = self._depth = 0
            self._held_since_s = None
        self._listeners += 1
        if self._is_main:
            self._take_over(signal.getsignal(signal.SIGINT))

    def detach(self) -> None:
        """Put the handler back that was there, unless others still listen or it was replaced."""
        self._listeners -= 1
        if self._is_main and not self._listeners and self._is_listening:
            signal.signal(signal.SIGINT, self._previous)

    def listen(self) -> None:
        """Take SIGINT over again if Python's own handler was set since."""
        if self._listeners and self._is_main:
            handler = signal.getsignal(signal.SIGINT)
            if handler is signal.default_int_handler:
                self._take_over(handler)

    def _take_over(self, handler: object) -> None:
        """Put our handler before this one; not where SIGINT is ignored, or ends the process."""
        if callable(handler) and handler != self._handle:
            self._previous = signal.signal(signal.SIGINT, self._handle)

    def __enter__(self) -> None:
        if self._is_main:
            self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_main and self._depth:
            self._depth -= 1
            self._raise_held()

    @property
    def _is_listening(self) -> bool:
        return signal.getsignal(signal.SIGINT) == self._handle

    @property
    def _is_main(self) -> bool:
        return threading.get_ident() == self._main

    def _raise_held(self) -> None:
        if self._held_since_s is not None and not self._depth:
            self._held_since_s = None
            self._previous(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = self._clock()
        if self._depth and os.getpid() == self._pid:
            if self._held_since_s is None:
                self._held_since_s = now_s
            if now_s < self._held_since_s + _PATIENCE_S:
                return
        self._held_since_s = None
        self._previous(number, frame)


KEYBOARD = Keyboard()


def uninterrupted(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, in which Ctrl-C is held back, and raised as it returns."""

    @functools.wraps(function)
    def held(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with KEYBOARD:
            return function(*args, **kwargs)

    return held
