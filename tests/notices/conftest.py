"""Commands on PATH, a metadata server, and a clock that tests set."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from checkfreq.notices.source import Clock, EndsAt, NoticeSource


@dataclass
class SetClock:
    """Two clocks that a test moves, together or one alone."""

    unix_s: float = 1_000_000.0
    monotonic_s: float = 500.0

    def clock(self) -> Clock:
        return Clock(lambda: self.unix_s, lambda: self.monotonic_s)

    def pass_(self, seconds: float) -> None:
        """Time passes."""
        self.unix_s += seconds
        self.monotonic_s += seconds


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


def end_of(source: NoticeSource) -> EndsAt:
    """The end that a source tells; it must tell one."""
    ends = source.poll()
    assert ends is not None
    return ends


Install = Callable[[str, str], Path]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a shell script on PATH, under a name; it writes its arguments to ``NAME.called``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def install(name: str, script: str) -> Path:
        path, called = folder / name, tmp_path / f"{name}.called"
        path.write_text(f'#!/bin/sh\necho "$@" >> {called}\n{script}\n')
        path.chmod(0o755)
        return called

    return install


@dataclass
class Server:
    """A metadata server: what it answers by method and path, and what it was asked."""

    url: str = ""
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    refuses: bool = False

    def paths(self) -> list[str]:
        return [what for what, _ in self.asked]


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A real one, on a port of this machine."""
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            what = f"{self.command} {self.path}"
            state.asked.append((what, {k.lower(): v for k, v in self.headers.items()}))
            status, text = (500, "") if state.refuses else state.answers.get(what, (404, ""))
            self.send_response(status)
            for name, value in state.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        state.url = f"http://127.0.0.1:{httpd.server_address[1]}"
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        httpd.shutdown()
        thread.join(60.0)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as state:
        yield state
