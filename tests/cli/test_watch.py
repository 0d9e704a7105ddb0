"""``checkfreq watch``: once, as JSON, as a page, for Prometheus, live on a terminal."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from checkfreq.cli import main
from checkfreq.story.figures import figures
from checkfreq.story.live import Live
from checkfreq.story.model import Story
from checkfreq.story.watch import terminal
from checkfreq.story.watch.prometheus import metrics
from checkfreq.story.watch.server import WatchServer
from tests.cli.golden import compare
from tests.story.made import START_S, two_runs, write

Capture = pytest.CaptureFixture[str]
NOW_S = START_S + 125.0


@pytest.fixture
def chk_dir(tmp_path: Path) -> Path:
    return write(tmp_path / "chk", two_runs())


@pytest.fixture
def live(chk_dir: Path) -> Live:
    return Live(chk_dir)


def test_once_prints_what_a_script_can_read(chk_dir: Path, capsys: Capture) -> None:
    assert main(["watch", "--once", str(chk_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(str(chk_dir))
    assert any(re.match("last durable +iteration 160, ", line) for line in lines)


def test_the_json_is_what_it_was(chk_dir: Path, capsys: Capture) -> None:
    assert main(["watch", "--once", "--json", str(chk_dir)]) == 0
    assert json.loads(capsys.readouterr().out)["last_durable_step"] == 160
    story = Story()
    story.add_all(two_runs())
    now = figures(story, now_s=NOW_S, is_held=True, being_written_step=200)
    compare("watch", now.to_json())


def test_the_terminal_view_is_what_it_was(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    now = live.look(now_s=NOW_S)
    console = Console(width=76, record=True, file=io.StringIO(), legacy_windows=False)
    console.print(terminal.panel(now, name="chk/"))
    compare("watch_terminal", console.export_text().splitlines())
    compare("watch_plain", terminal.plain(now, name="chk/").splitlines())


def test_on_a_terminal_it_lives_until_it_is_interrupted(chk_dir: Path) -> None:
    shown = b""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "checkfreq.cli", "watch", "--every", "0.1", str(chk_dir)]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environ) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # the other end is closed
            while shown.count(b"last durable") < 3:
                shown += os.read(ours, 4096)
        process.send_signal(2)
        with contextlib.suppress(OSError):
            while os.read(ours, 4096):
                pass
        assert process.stderr is not None
        assert process.stderr.read() == b"checkfreq: interrupted\n"
    os.close(ours)
    assert process.returncode == 130


def test_the_metrics_are_in_the_format_of_prometheus(live: Live) -> None:
    text = metrics(live.look(now_s=NOW_S), name='a"b\\c\nd')
    compare("watch_metrics", text.splitlines())


@pytest.fixture
def server(live: Live) -> Iterator[WatchServer]:
    server = WatchServer(lambda: live.look(now_s=NOW_S), name="chk/<b>", port=0)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    yield server
    server.close()
    thread.join(30)


def ask(
    server: WatchServer, name: str, *, host: str = "", root: str | None = None
) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    path = (urlsplit(server.url).path if root is None else root) + name
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    found = answer.status, answer.headers["Content-Type"], answer.read().decode()
    connection.close()
    return found


def test_the_server_has_a_page_the_figures_and_metrics(server: WatchServer) -> None:
    assert ask(server, "")[:2] == (200, "text/html; charset=utf-8")
    status, _, text = ask(server, "figures.json")
    assert status == 200
    assert json.loads(text)["figures"]["last_durable_step"] == 160
    status, kind, text = ask(server, "metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'checkfreq_last_durable_step{dir="chk/<b>"} 160' in text
    assert ask(server, "events.jsonl")[0] == 404


def test_a_request_under_the_name_of_another_host_is_refused(server: WatchServer) -> None:
    assert ask(server, "figures.json", host=f"evil.example:{server.port}")[0] == 403
    assert ask(server, "figures.json", host=f"localhost:{server.port}")[0] == 200


@pytest.mark.parametrize("root", ["/", "", "/another/", "/\u00fc/"])
@pytest.mark.parametrize("name", ["", "figures.json", "metrics"])
def test_another_user_of_this_machine_who_does_not_know_the_address_gets_nothing(
    server: WatchServer, root: str, name: str
) -> None:
    status, _, text = ask(server, name, root=quote(root, encoding="latin-1") or "/")
    assert (status, "expected the address that watch printed" in text) == (403, True)


def test_the_server_listens_to_this_machine_only_at_an_address_that_nobody_guesses(
    server: WatchServer,
) -> None:
    assert re.fullmatch(f"http://127.0.0.1:{server.port}/[A-Za-z0-9_-]{{40,}}/", server.url)


@pytest.mark.parametrize("token", ["short", "a/token-with-a-slash", ""])
def test_a_token_of_ones_own_is_checked(
    token: str, chk_dir: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKFREQ_WATCH_TOKEN", token)
    assert main(["watch", "--http", "0", str(chk_dir)]) == 2
    assert "CHECKFREQ_WATCH_TOKEN: expected 16 to 200 letters" in capsys.readouterr().err


def test_a_directory_whose_name_is_no_text_can_be_watched(tmp_path: Path) -> None:
    chk_dir = write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/na\xffme")), two_runs())
    target = tmp_path / "checkfreq.prom"
    assert main(["watch", "--once", "--textfile", str(target), str(chk_dir)]) == 0
    assert "na\\\\udcffme" in target.read_text()
    assert main(["watch", "--once", str(chk_dir)]) == 0
    assert main(["watch", "--once", "--json", str(chk_dir)]) == 0
    assert main(["report", str(chk_dir), "--out", str(tmp_path / "a.html")]) == 0
    assert main(["log", str(chk_dir)]) == 0
