"""The supervisor's signals: blocked, and taken one by one, so that there are no handlers to race.

A signal that was ignored when the supervisor started stays ignored, for the script too: that is
how ``nohup`` and background jobs of a shell say that they do not want it.
"""

from __future__ import annotations

import os
import signal
from types import TracebackType

#: They end the supervision, whatever the script makes of them.
FINAL = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
#: They are passed on, and end the supervision only if the script dies of them, or there is none.
FATAL = frozenset({signal.SIGUSR1, signal.SIGUSR2})
PASSED = FATAL | {signal.SIGCONT, signal.SIGTSTP}
#: The kernel's own: from the keyboard, for instance.
_SI_KERNEL = 0x80
#: The kernel sends these to the terminal's whole foreground group, so to the script as well.
_FROM_KEYBOARD = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP})


class Signals:
    """The signals that the supervisor takes, while it is entered."""

    def __init__(self) -> None:
        self.taken = {
            number for number in FINAL | PASSED if signal.getsignal(number) != signal.SIG_IGN
        }
        self.mask_before: set[int] = set()

    def __enter__(self) -> Signals:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, children would not be waited for
        self.mask_before = set(
            signal.pthread_sigmask(signal.SIG_BLOCK, {*self.taken, signal.SIGCHLD})
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave them blocked: one that comes now must not change the exit status."""

    def next(self, *, timeout_s: float) -> signal.struct_siginfo | None:
        """The next signal, SIGCHLD included; None if none comes within ``timeout_s``."""
        return signal.sigtimedwait({*self.taken, signal.SIGCHLD}, max(0.0, timeout_s))


def reached_the_script(info: signal.struct_siginfo) -> bool:
    """Whether the script was sent this signal too."""
    return info.si_code == _SI_KERNEL and info.si_signo in _FROM_KEYBOARD


def stop_ourselves() -> None:
    """Take SIGTSTP's own effect; returns when somebody continues us.

    Not SIGSTOP: where nobody could continue us, the kernel lets SIGTSTP have no effect.
    """
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
