"""The script's process: started, sent the signals that we get, and waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from checkfreq.supervisor.processes import Ended, reap, signal_name, start
from checkfreq.supervisor.signals import FINAL, Signals, reached_the_script, stop_ourselves


class Script:
    """One process at a time. Everything that the supervisor waits for comes as a signal."""

    def __init__(self, command: Sequence[str], *, signals: Signals) -> None:
        self._command = command
        self._signals = signals
        self._pid: int | None = None
        #: How its latest process ended; None while it runs.
        self.ended: Ended | None = None
        #: The first signal that means that it is not to be started again.
        self.told_by: str | None = None
        #: The signals that its latest process was passed.
        self.passed: set[int] = set()

    def start(self, environ: Mapping[str, str]) -> None:
        """Start it, and return. Raises OSError if that cannot be done."""
        self.ended, self.passed = None, set()
        self._pid = start(self._command, environ=environ, mask=self._signals.mask_before)

    def wait(self, *, timeout_s: float, until: Callable[[], bool]) -> bool:
        """Take signals until ``until()`` holds, at most for ``timeout_s``; whether it does."""
        end_s = time.monotonic() + timeout_s
        while not until():
            left_s = end_s - time.monotonic()
            if left_s <= 0.0:
                return False
            self._take(self._signals.next(timeout_s=left_s))
        return True

    def _take(self, info: signal.struct_siginfo | None) -> None:
        if info is None:
            return
        if info.si_signo == signal.SIGCHLD:
            self._reap()
            return
        if info.si_signo in FINAL and self.told_by is None:
            self.told_by = signal_name(info.si_signo)
        self._pass_on(info)
        if info.si_signo == signal.SIGTSTP:
            stop_ourselves()

    def _reap(self) -> None:
        ended = reap()  # also of processes that were given to us
        if self._pid in ended:
            self.ended, self._pid = ended[self._pid], None

    def _pass_on(self, info: signal.struct_siginfo) -> None:
        self.passed.add(info.si_signo)
        if self._pid is not None and not reached_the_script(info):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, info.si_signo)
