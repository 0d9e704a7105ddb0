"""Who is at the other end of a UNIX socket."""

from __future__ import annotations

import os
import re
import socket
import struct
from pathlib import Path

from checkfreq.persist.frames import HandoverError

_CREDENTIALS = struct.Struct("iII")
_PID = re.compile(r"^Pid:\t(-?[0-9]+)$", re.MULTILINE)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as they were when it connected, or began to listen.

    The process is 0 if it is in a container of its own.
    """
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user


def require_same_user(sock: socket.socket) -> None:
    """Raise HandoverError unless the process at the other end runs as this user."""
    _, user = peer_of(sock)
    if user != os.geteuid():
        raise HandoverError(f"the other end runs as user {user}, this one as {os.geteuid()}")


def require_pidfd_of(pidfd: int, sock: socket.socket) -> None:
    """Raise HandoverError unless ``pidfd`` is one of the process at the other end, which lives."""
    found = _PID.search(Path(f"/proc/self/fdinfo/{pidfd}").read_text())
    process, _ = peer_of(sock)
    if found is None or int(found[1]) != process:
        raise HandoverError(f"expected a pidfd of process {process}, got {found and found[1]}")
