"""The supervisor's side of a standby: a process that has imported torch and waits to be the script.

It is started beside the script, once that is training, and used for the next start. It is told to
start by a line on a socket, and answers with one when signals can be passed to it. One that ends
by itself is not replaced: whatever ended it, memory for instance, would end the next one too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence

from checkfreq.supervisor.board import VARIABLE
from checkfreq.supervisor.command import PythonCommand
from checkfreq.supervisor.processes import Ended, start

#: Under which number a standby gets its end of the socket.
_FD = 3
#: The standby's exit status where its Python has no checkfreq like this one.
_NO_CHECKFREQ = 3
#: Not found from the current directory, which ``-c`` would search first. Process listings show the
#: first line, and the script with its arguments, which follow.
_PROGRAM = """\
# checkfreq run: standby
import sys
if not getattr(sys.flags, 'safe_path', sys.flags.isolated):
    del sys.path[0]
try:
    from checkfreq.supervisor.becoming import main
except ImportError:
    sys.exit({no_checkfreq})
main({turn!r})
"""


class Standby:
    """At most one process that waits. ``say`` is given a line where there can be none."""

    def __init__(
        self,
        command: PythonCommand,
        whole: Sequence[str],
        *,
        environ: Mapping[str, str],
        mask: Callable[[], set[int]],
        imports: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self._command = command
        self._whole = whole
        self._environ = environ
        self._mask = mask
        self._imports = imports
        self._say = say
        self._pid: int | None = None
        self._ended: Ended | None = None
        self._socket: socket.socket | None = None
        self._was_told = False
        self._is_given_up = False

    # ---- while the script runs

    @property
    def is_missing(self) -> bool:
        """Whether one is to be started."""
        return self._pid is None and not self._is_given_up

    def prepare(self) -> None:
        """Start one. Its imports take as long as those of the script."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        turn = {
            "fd": _FD,
            "command": list(self._whole),
            "is_module": self._command.is_module,
            "name": self._command.name,
            "arguments": list(self._command.arguments),
            "mask": sorted(map(int, self._mask())),
            "more": list(self._imports),
        }
        program = _PROGRAM.format(no_checkfreq=_NO_CHECKFREQ, turn=json.dumps(turn))
        words = [self._command.executable, *self._command.options, "-c", program]
        words += [self._command.name, *self._command.arguments]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        with theirs:
            fds = {_FD: theirs.fileno()}
            self._pid = start(words, environ=self._environ, mask=set(blocked), fds=fds)
        self._socket, self._ended, self._was_told = ours, None, False

    def take_ended(self, ended: Mapping[int, Ended]) -> None:
        """Look for it among children that ended."""
        if self._pid is not None and self._pid in ended:
            self._ended = ended[self._pid]
            if not self._was_told:
                self._give_up(self._ended)

    # ---- its turn

    @property
    def is_getting_ready(self) -> bool:
        """Whether it was told to start, and cannot be sent signals yet."""
        if self._socket is None or not self._was_told or self._ended is not None:
            return False
        try:
            if self._socket.recv(1):
                self._close()
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def hand_over(self, environ: Mapping[str, str]) -> None:
        """Tell it to start, if there is one."""
        if self._socket is None or self._ended is not None:
            return
        given = {VARIABLE: environ[VARIABLE]}
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(given).encode() + b"\n")
            self._was_told = True

    def let_go(self) -> tuple[int | None, Ended | None]:
        """The process that is the script now, or how it ended already; neither if it is not."""
        is_script = self._pid is not None and self._was_told and self._socket is None
        pid, ended = self._pid, self._ended
        if not is_script:
            if ended is not None:
                self._give_up(ended)
            self.kill()
            return None, None
        self._pid = self._ended = None
        return (pid, None) if ended is None else (None, ended)

    # ---- its end

    def kill(self) -> None:
        """End it; it is reaped like any child."""
        if self._pid is not None and self._ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._close()
        self._pid = self._ended = None

    def _give_up(self, ended: Ended) -> None:
        self._is_given_up = True
        why = f"it ended while it waited ({ended})"
        if ended.code == _NO_CHECKFREQ:
            why = f"{self._command.executable} finds no checkfreq of this version"
        self._say(f"no standby from now on: {why}")
        self.kill()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
