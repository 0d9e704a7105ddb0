"""Lets the processes of one user on a node take turns, by a lock on a file.

Only a courtesy: where the file cannot be locked, or its owner does not let go in time, one goes on
without. The lock of a process that dies is free at once, unless a process that it had forked at
that instant lives on. Containers that share no folder for such files do not see each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.01


def _default_path() -> Path:
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(folder, f"checkfreq-{os.getuid()}.pinning")


class NodeTurns:
    """Turns among all who use the same ``path``.

    A turn should last a fraction of a second. Whoever waits ``patience_s`` in vain waits no more.
    """

    def __init__(self, path: Path | None = None, *, patience_s: float = 30.0) -> None:
        self._path = path or _default_path()
        self._patience_s = patience_s
        self._gave_up = False

    @contextlib.contextmanager
    def turn(self, hurry: threading.Event) -> Iterator[None]:
        """Wait for a turn, but not once ``hurry`` is set, and hold it in the block."""
        fd = None if self._gave_up or hurry.is_set() else self._locked(hurry)
        try:
            yield
        finally:
            if fd is not None:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a forked process may have the descriptor as well
                os.close(fd)
                hurry.wait(2 * _LOOK_EVERY_S)  # or those who look for it would never find it free

    def _locked(self, hurry: threading.Event) -> int | None:
        """A descriptor that has the lock; None if one has to do without."""
        try:
            # Not through a link, which another user may have put into a shared folder.
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._give_up(str(error))
            return None
        if self._is_mine_in_time(fd, hurry):
            return fd
        os.close(fd)
        return None

    def _is_mine_in_time(self, fd: int, hurry: threading.Event) -> bool:
        give_up_s = time.monotonic() + self._patience_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= give_up_s:
                    self._give_up(f"another process has held it for {self._patience_s:.0f} s")
                    return False
            except OSError as error:  # a file system without locks
                self._give_up(str(error))
                return False
            if hurry.wait(_LOOK_EVERY_S):
                return False

    def _give_up(self, why: str) -> None:
        self._gave_up = True
        logger.info("processes of this node pin memory at the same time: %s: %s", self._path, why)
