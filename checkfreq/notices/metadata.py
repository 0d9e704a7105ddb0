"""Asks a cloud's metadata service: one request on a link-local address, answered in a second.

No proxy and no redirect is followed: the address means this very machine.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from checkfreq.notices.source import NoAnswerError

#: The address of all three.
LINK_LOCAL = "http://169.254.169.254"
_TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """What was ``asked``, a status, the headers by lower-case name, and the body."""

    asked: str
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    text: str = ""

    def body(self) -> str:
        """The body of a successful answer; NoAnswerError for any other status."""
        if self.status != 200:
            raise NoAnswerError(f"{self.asked}: status {self.status}")
        return self.text


class MetadataService:
    """One service. ``url``: where it is, None for ``LINK_LOCAL``."""

    def __init__(self, url: str | None = None, *, timeout_s: float = _TIMEOUT_S) -> None:
        parts = urlsplit(url or LINK_LOCAL)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._path = parts.path.rstrip("/")
        self._timeout_s = timeout_s

    def ask(self, path: str, headers: Mapping[str, str] = {}, *, method: str = "GET") -> Answer:
        """One request, which takes at most twice ``timeout_s``; NoAnswerError without an answer."""
        asked = f"{method} http://{self._host}:{self._port}{self._path}{path}"
        connection = HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.connect()
            with _limited(connection.sock, self._timeout_s):
                connection.request(method, self._path + path, headers=dict(headers))
                reply = connection.getresponse()
                text = reply.read(_MOST_BYTES).decode(errors="replace")
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Answer(asked, reply.status, found, text.strip())
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswerError(f"{asked}: {error}") from error
        finally:
            connection.close()


@contextlib.contextmanager
def _limited(sock: socket.socket, timeout_s: float) -> Iterator[None]:
    """Shut the socket down after ``timeout_s``.

    Its own timeout is for each byte, and a server may send them one by one.
    """

    def shut() -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
