"""``checkfreq watch --http``: live figures as a page, JSON and Prometheus' text.

Listens on 127.0.0.1 only, where every user of the machine can connect: all paths begin with a token
that only the address has. Answers GET and HEAD, and no request that names another host: a page of
somebody else's in the same browser must not read it under a name of its own.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from checkfreq.errors import ConfigError, printable
from checkfreq.story.figures import Figures
from checkfreq.story.watch.lines import clock, rows
from checkfreq.story.watch.live_page import LIVE_PAGE
from checkfreq.story.watch.prometheus import metrics

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
)


class WatchServer:
    """Serves what ``look`` returns, asked once per request. ``port`` 0 takes any free one.

    ``token``: what paths begin with; a random one if it is None.
    """

    def __init__(
        self, look: Callable[[], Figures], *, name: str, port: int, token: str | None = None
    ) -> None:
        self._look = look
        self._name = name
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"watch": self})
        try:
            self._server = ThreadingHTTPServer((HOST, port), handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--http {port}: expected a free port of {HOST}, got {error}: choose another one, "
                "or 0 for any"
            ) from None
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._token = secrets.token_urlsafe() if token is None else token
        self.url = f"http://{HOST}:{self.port}/{self._token}/"

    def serve(self) -> None:
        """Answer requests until `close`."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop, from another thread than the one that serves."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """The type and the body of what is at a path; None if there is nothing there."""
        _, _, name = path.rpartition("/")
        if name == "":
            return "text/html; charset=utf-8", LIVE_PAGE.encode()
        if name not in ("figures.json", "metrics"):
            return None
        with self._lock:
            now = self._look()
        if name == "metrics":
            text = metrics(now, name=self._name)
            return "text/plain; version=0.0.4; charset=utf-8", text.encode()
        document = {
            "name": printable(self._name),
            "clock": clock(now),
            "rows": rows(now),
            "figures": now.to_json(),
        }
        return "application/json", json.dumps(document).encode()

    def admits(self, path: str) -> bool:
        """Whether a path begins with the token."""
        begin, _, _ = path.rpartition("/")
        return secrets.compare_digest(begin.encode(), f"/{self._token}".encode())

    def knows(self, host: str) -> bool:
        """Whether a request's Host header names this machine."""
        return host.rpartition(":")[0] in _NAMES or host in _NAMES


class _Handler(BaseHTTPRequestHandler):
    watch: WatchServer
    server_version = "checkfreq"
    sys_version = ""
    timeout = 30

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):  # the client went away
            super().handle()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        if not self.watch.knows(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.FORBIDDEN, "expected 127.0.0.1 or localhost as the host")
            return
        if not self.watch.admits(path):
            self.send_error(HTTPStatus.FORBIDDEN, "expected the address that watch printed")
            return
        answer = self.watch.answer(path)
        if answer is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind, body = answer
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", _POLICY)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line."""
