"""Notices that the run must end: a signal from a scheduler or a cloud.

The handler only sets a flag, then calls the handler it replaced; everything else happens at
the next iteration boundary. A forked loader process inherits the handler: there it restores
the default and lets the signal do what it does.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from checkfreq.errors import ConfigError
from checkfreq.loader_deaths import QuietChildren

logger = logging.getLogger(__name__)

_LOOK_S = 0.02


class StopNotice:
    """A flag raised by any of the given signals."""

    def __init__(self, signal_names: Sequence[str]) -> None:
        self._numbers = [_signal_number(name) for name in signal_names]
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()
        self._listening = False
        self._children = QuietChildren()
        self.received: str | None = None

    @property
    def is_set(self) -> bool:
        """True once a signal came."""
        return self.received is not None

    def comes_within(self, seconds: float) -> bool:
        """Whether a signal came, or does so very soon; in the main thread."""
        end_s = time.monotonic() + seconds
        while not self.is_set and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        return self.is_set

    def install(self) -> None:
        """Start listening; only the main thread may, elsewhere it says so and does nothing."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "stop signals are not watched: CFManager was made outside the main thread"
            )
            return
        self._listening = True
        for number in self._numbers:
            self._previous[number] = signal.signal(number, self._handle)

    def uninstall(self) -> None:
        """Put the previous handlers back, unless somebody replaced ours meanwhile.

        That somebody may put ours back later (a second manager, closed after this one): it
        then only passes the signal on.
        """
        self._listening = False
        self._children.uninstall()
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            _take_default(number)
            return
        if self._listening:
            self.received = signal.Signals(number).name
            self._children.install()
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
        elif not self._listening and previous != signal.SIG_IGN:
            _take_default(number)


def _take_default(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _signal_number(name: str) -> int:
    number = signal.Signals.__members__.get(name)
    if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(
            f"CFConfig.stop_signals: expected names of signals that can be caught, like "
            f"'SIGTERM', got {name!r}"
        )
    return number
