"""The script's process: started, sent the signals that we get, and waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from checkfreq.supervisor.processes import Ended, kill_tree, reap, signal_name, start
from checkfreq.supervisor.signals import (
    FATAL,
    FINAL,
    Signals,
    reached_the_script,
    stop_ourselves,
)
from checkfreq.supervisor.standby import Standby

#: Importing torch may take long on a slow file system; a start from scratch would take longer.
_HAND_OVER_S = 300.0
_LOOK_S = 0.01
#: A launcher and a scheduler may both pass on the same signal; one that comes later is another.
_ANOTHER_S = 5.0


class Script:
    """One process at a time. Everything that the supervisor waits for comes as a signal."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        signals: Signals,
        say: Callable[[str], None],
        standby: Standby | None = None,
    ) -> None:
        self._command = command
        self._signals = signals
        self._say = say
        self._standby = standby
        self._pid: int | None = None
        #: How its latest process ended; None while it runs.
        self.ended: Ended | None = None
        #: The first signal that means that it is not to be started again.
        self.told_by: int | None = None
        self._told_s = 0.0
        #: The signals that its latest process was passed.
        self.passed: set[int] = set()

    def start(self, environ: Mapping[str, str]) -> None:
        """Start it, and return. Raises OSError if that cannot be done."""
        self.ended, self.passed = None, set()
        if self._standby is None or not self._hand_over_to(self._standby, environ):
            self._pid = start(self._command, environ=environ, mask=self._signals.mask_before)

    def _hand_over_to(self, standby: Standby, environ: Mapping[str, str]) -> bool:
        """Let the standby become the script; False if it cannot, or there is none.

        A signal to end that comes before the standby can take it ends the standby.
        """
        end_s = time.monotonic() + _HAND_OVER_S
        standby.hand_over(environ)
        while standby.is_getting_ready and self.told_by is None and time.monotonic() < end_s:
            self.wait(timeout_s=_LOOK_S, until=lambda: not standby.is_getting_ready)
        if self.told_by is not None and standby.is_getting_ready:
            standby.kill()
            self.ended = Ended(-self.told_by)
            return True
        self._pid, self.ended = standby.let_go()
        return self._pid is not None or self.ended is not None

    def wait(self, *, timeout_s: float, until: Callable[[], bool]) -> bool:
        """Take signals until ``until()`` holds, at most for ``timeout_s``; whether it does."""
        end_s = time.monotonic() + timeout_s
        while not until():
            left_s = end_s - time.monotonic()
            if left_s <= 0.0:
                return False
            self._take(self._signals.next(timeout_s=left_s))
        return True

    def kill(self) -> None:
        """End it and all that it started, but the persist workers."""
        if self._pid is not None:
            kill_tree(self._pid)

    def _take(self, info: signal.struct_siginfo | None) -> None:
        if info is None:
            return
        if info.si_signo == signal.SIGCHLD:
            self._reap()
            return
        if self._means_the_end(info.si_signo):
            self._take_final(info.si_signo)
        self._pass_on(info)
        if info.si_signo == signal.SIGTSTP:
            stop_ourselves()

    def _means_the_end(self, number: int) -> bool:
        """Between two runs nobody else acts on a signal: those end it that would end a script."""
        return number in FINAL or (self._pid is None and number in FATAL)

    def _take_final(self, number: int) -> None:
        """The first one is the script's to act on; it may hang, so another one kills it."""
        now_s = time.monotonic()
        if self.told_by is None:
            self.told_by, self._told_s = number, now_s
        elif self._pid is not None and now_s >= self._told_s + _ANOTHER_S:
            waited_s = now_s - self._told_s
            self._say(
                f"{signal_name(number)}, {waited_s:.0f} s after {signal_name(self.told_by)}: "
                "killing the script"
            )
            self.kill()

    def _reap(self) -> None:
        ended = reap()  # also of processes that were given to us
        if self._pid in ended:
            self.ended, self._pid = ended[self._pid], None
        if self._standby is not None:
            self._standby.take_ended(ended)

    def _pass_on(self, info: signal.struct_siginfo) -> None:
        self.passed.add(info.si_signo)
        if self._pid is not None and not reached_the_script(info):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, info.si_signo)
