"""Stop signals: how a scheduler or a cloud tells a run to end.

Before the first boundary there is nothing to save and nothing to act on a signal, so signals keep
their usual effect: they end a process that is still starting, restoring or hanging. From the first
boundary on, the handler sets a flag and calls the handler it replaced; everything else happens at
the next boundary. A second signal changes nothing: launchers and schedulers signal both the process
and its group. That holds until the process has ended, or its exit status would not say that it was
stopped. A forked process inherits the handler; there the signal does what it did before.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from checkfreq.errors import ConfigError
from checkfreq.run.loader_deaths import QuietChildren

logger = logging.getLogger(__name__)

_LOOK_S = 0.02

#: After a stop the process is leaving: signals that repeat the first one come within this time.
#: Later ones end a process that caught the exit and went on.
_LEAVING_S = 30.0


class StopNotice:
    """A flag raised by any of the given signals, from ``install`` on."""

    def __init__(
        self, signal_names: Sequence[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._numbers = [_signal_number(name) for name in signal_names]
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()
        self._was_installed = False
        self._listening = False
        self._left_s: float | None = None
        self._children = QuietChildren()
        self.received: str | None = None
        #: When SIGTERM first came, by ``time.perf_counter``: a kill usually follows it.
        self.terminated_s: float | None = None

    @property
    def is_set(self) -> bool:
        """True once a signal was received."""
        return self.received is not None

    def comes_within(self, seconds: float) -> bool:
        """Whether a signal was received, or is within ``seconds``; for the main thread."""
        end_s = time.monotonic() + seconds
        while not self.is_set and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        return self.is_set

    def install(self) -> None:
        """Start listening, once. Outside the main thread, warn and do nothing."""
        if self._was_installed:
            return
        self._was_installed = True
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "stop signals are not watched: CFManager is used outside the main thread"
            )
            return
        self._listening = True
        for number in self._numbers:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run is to outlive its terminal
            self._previous[number] = signal.signal(number, self._handle)

    def uninstall(self, *, has_stopped: bool = False) -> None:
        """Put the previous handlers back, unless somebody replaced ours meanwhile.

        They may put ours back later (a second manager that is closed after this one): it then
        only passes signals on. If the run ``has_stopped``, a signal that would now end the process
        is swallowed instead: it is leaving, with a status that says so.
        """
        self._listening = False
        self._children.uninstall()
        for number, previous in self._previous.items():
            if signal.getsignal(number) != self._handle:
                continue
            if has_stopped and previous in (signal.SIG_DFL, None):
                self._left_s = self._clock()
            else:
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        if self._left_s is not None:
            atexit.register(self._ignore)

    def _ignore(self) -> None:
        """No handler runs once the interpreter is being finalised, but what is ignored stays so."""
        for number in self._previous if os.getpid() == self._pid else ():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        listens = self._listening and os.getpid() == self._pid
        if listens:
            self.received = signal.Signals(number).name
            if number == signal.SIGTERM and self.terminated_s is None:
                self.terminated_s = time.perf_counter()
            self._children.install()
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
        elif not (listens or self._is_leaving or previous == signal.SIG_IGN):
            self._take_default(number)

    @property
    def _is_leaving(self) -> bool:
        if self._left_s is None or os.getpid() != self._pid:
            return False
        return self._clock() < self._left_s + _LEAVING_S

    def _take_default(self, number: int) -> None:
        """Let the signal take its default effect, unless a handler above this one decides."""
        if signal.getsignal(number) == self._handle:
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
