"""Asks a cloud's metadata service: one request on a link-local address, answered in a second.

No proxy and no redirect is followed: the address means this very machine. A service that does not
answer is asked less and less often, and nothing is logged: it may simply not be there.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

#: The address of all three.
LINK_LOCAL = "http://169.254.169.254"
_TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 16
#: A spot notice leaves 30 s to two minutes, and the services are made to be polled so.
_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 600.0
#: Once it has answered it is known to be there.
_LONGEST_KNOWN_PAUSE_S = 60.0


class NoAnswerError(Exception):
    """The service is not there, or did not say anything that makes sense."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, the headers by lower-case name, and the body."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    text: str = ""

    def body(self) -> str:
        """The body of a successful answer; NoAnswerError for any other status."""
        if self.status != 200:
            raise NoAnswerError(f"status {self.status}")
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
        connection = HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.connect()
            with _limited(connection.sock, self._timeout_s):
                connection.request(method, self._path + path, headers=dict(headers))
                reply = connection.getresponse()
                text = reply.read(_MOST_BYTES).decode(errors="replace")
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Answer(reply.status, found, text.strip())
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswerError(str(error)) from error
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


class Patience:
    """How long to wait before a service is asked again."""

    def __init__(self) -> None:
        self.pause_s = _PAUSE_S
        self._is_known = False

    def answered(self) -> None:
        """It is there."""
        self.pause_s, self._is_known = _PAUSE_S, True

    def failed(self) -> None:
        """It did not answer."""
        longest_s = _LONGEST_KNOWN_PAUSE_S if self._is_known else _LONGEST_PAUSE_S
        self.pause_s = min(2 * self.pause_s, longest_s)
