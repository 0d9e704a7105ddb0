"""A proxy in front of an S3 server that fails, delays or cuts one request in five."""

from __future__ import annotations

import contextlib
import enum
import http.client
import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_TIMEOUT_S = 60.0
_DELAY_S = 0.3
_ERROR = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>InternalError</Code>'
    b"<Message>injected</Message></Error>"
)


class Fault(enum.Enum):
    """What becomes of a request."""

    NONE = "passed on"
    FAIL = "answered with 500, not passed on"
    SLOW_DOWN = "answered with 503, not passed on"
    DELAY = "passed on late"
    CUT_REQUEST = "connection closed, not passed on"
    LOSE_REPLY = "passed on, connection closed without a reply"
    CUT_REPLY = "passed on, connection closed in the middle of the reply"
    HANG = "not passed on, not answered as long as the proxy is there"


_FAULTS = tuple(fault for fault in Fault if fault not in (Fault.NONE, Fault.HANG))

#: Decides by method and path.
Plan = Callable[[str, str], Fault]


def one_in_five() -> Plan:
    """Every fifth request has a fault, of each kind in turn."""
    numbers, kinds = itertools.count(1), itertools.cycle(_FAULTS)
    lock = threading.Lock()

    def decide(method: str, path: str) -> Fault:
        with lock:
            return next(kinds) if next(numbers) % 5 == 0 else Fault.NONE

    return decide


class FaultProxy:
    """Where the proxy listens, what it did, and a switch to cut everything."""

    def __init__(self, server_port: int, plan: Plan) -> None:
        self.server_port = server_port
        self.plan = plan
        self.seen: Counter[Fault] = Counter()
        self.is_over = threading.Event()
        #: An answer to every request instead of the server's: a status and a code.
        self.refuses: tuple[int, str] | None = None
        self.port = 0

    @property
    def num_faults(self) -> int:
        return self.seen.total() - self.seen[Fault.NONE]

    @contextlib.contextmanager
    def listening(self) -> Iterator[FaultProxy]:
        self.come_back()
        try:
            yield self
        finally:
            self.is_over.set()
            self.leave()

    def come_back(self) -> None:
        """Listen where nobody does: at the beginning, or after `leave`."""
        self._http = _Server(("127.0.0.1", self.port), _Handler)
        self._http.proxy = self
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def leave(self) -> None:
        """Refuse new connections; those that there are stay."""
        self._http.shutdown()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    proxy: FaultProxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that went away are no news here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _pass(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = proxy.plan(self.command, self.path)
        proxy.seen[fault] += 1
        if proxy.refuses is not None:
            status, code = proxy.refuses
            return self._reply(status, [], f"<Error><Code>{code}</Code></Error>".encode())
        match fault:
            case Fault.CUT_REQUEST:
                return self._cut()
            case Fault.HANG:
                proxy.is_over.wait()
                return self._cut()
            case Fault.FAIL:
                return self._reply(500, [("Content-Type", "application/xml")], _ERROR)
            case Fault.SLOW_DOWN:
                return self._reply(503, [("Content-Type", "application/xml")], _ERROR)
            case Fault.DELAY:
                time.sleep(_DELAY_S)
        status, headers, data = self._forward(body)
        if fault is Fault.LOSE_REPLY:
            return self._cut()
        cut_at = len(data) // 2 if fault is Fault.CUT_REPLY else None
        return self._reply(status, headers, data, cut_at=cut_at)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.server.proxy.server_port, timeout=_TIMEOUT_S
        )
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(body)
            reply = connection.getresponse()
            return reply.status, reply.getheaders(), reply.read()
        finally:
            connection.close()

    def _reply(
        self,
        status: int,
        headers: list[tuple[str, str]],
        data: bytes,
        *,
        cut_at: int | None = None,
    ) -> None:
        self.send_response_only(status)
        skipped = {"connection", "transfer-encoding", "keep-alive"}
        names = {name.lower() for name, _ in headers}
        for name, value in headers:
            if name.lower() not in skipped:
                self.send_header(name, value)
        if "content-length" not in names:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut_at])
        if cut_at is not None:
            self._cut()

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on standard error."""
