"""``checkfreq watch``: once, as JSON, as a page, for Prometheus, live on a terminal."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
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
from tests.story.made import START_S, event, two_runs, write

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


@pytest.mark.parametrize(("width", "height", "left"), [(40, 20, 0), (40, 8, 7), (30, 1, 11)])
def test_a_small_window_shows_what_it_has_room_for_and_says_what_is_left_out(
    width: int, height: int, left: int, live: Live
) -> None:
    from rich.console import Console

    now = replace(live.look(now_s=NOW_S), num_failed_in_row=2, last_error="no room")
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True)
    view = terminal.fitted(now, name="chk", console=console)
    lines = ["".join(one.text for one in line).rstrip() for line in console.render_lines(view)]
    assert len(lines) <= max(height, 2)
    assert ("failing: 2 in a row: no room" in lines) == (height > 1)
    assert lines[-1].startswith("mirror: ") if not left else f"{left} more in a larger window"


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
    label = r'dir="a\"b\\c\nd"'.replace("\\", "\\\\")
    sample = re.compile(rf'checkfreq_[a-z_]+{{{label}(,state="[a-z]+")?}} [0-9.e+-]+')
    lines = text.splitlines()
    assert all(sample.fullmatch(line) for line in lines if not line.startswith("#"))
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len({*kinds})
    assert {"checkfreq_last_durable_step", "checkfreq_last_durable_age_seconds"} <= {*kinds}


def test_a_text_file_is_replaced_as_a_whole(chk_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "checkfreq.prom"
    target.parent.mkdir()
    for _ in range(2):
        assert main(["watch", "--once", "--textfile", str(target), str(chk_dir)]) == 0
    assert os.listdir(target.parent) == ["checkfreq.prom"]
    assert "checkfreq_last_durable_step{" in target.read_text()
    assert target.stat().st_mode & 0o777 == 0o644


@pytest.fixture
def server(live: Live) -> Iterator[WatchServer]:
    server = WatchServer(lambda: live.look(now_s=NOW_S), name="chk/<b>", port=0)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    yield server
    server.close()
    thread.join(30)


def ask(
    server: WatchServer, name: str, *, host: str = "", method: str = "GET", root: str | None = None
) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    path = (urlsplit(server.url).path if root is None else root) + name
    connection.request(method, path, headers={"Host": host} if host else {})
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


def test_a_client_that_goes_away_is_no_error(server: WatchServer, capfd: Capture) -> None:
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            path = urlsplit(server.url).path
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 100)
            # Close with a reset, while answers that nobody reads are on their way.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert ask(server, "figures.json")[0] == 200
    server.close()  # waits for nobody, but what the threads say comes before
    for thread in threading.enumerate():
        if "process_request" in thread.name:
            thread.join(30)
    assert capfd.readouterr().err == ""


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


def test_a_port_in_use_is_an_error(server: WatchServer, chk_dir: Path, capsys: Capture) -> None:
    assert main(["watch", "--http", str(server.port), str(chk_dir)]) == 2
    assert "expected a free port" in capsys.readouterr().err


def test_looking_changes_nothing_in_the_directory(live: Live) -> None:
    (live.chk_dir / ".lock").write_text("{}")
    (live.chk_dir / ".tmp-200-a1").mkdir()
    before = {path: path.stat() for path in live.chk_dir.iterdir()}
    assert live.look(now_s=NOW_S).state.value == "killed"
    live.look()
    after = {path: path.stat() for path in live.chk_dir.iterdir()}
    assert [(s.st_mtime_ns, s.st_size) for s in before.values()] == [
        (s.st_mtime_ns, s.st_size) for s in after.values()
    ]


def test_new_events_are_seen(live: Live) -> None:
    assert live.look(now_s=NOW_S).num_failed_in_row == 0
    with (live.chk_dir / "events.jsonl").open("a") as file:
        bad = event("failed", 200, NOW_S, error="no room\x1b[2J", steps_at_risk=52)
        file.write(json.dumps(bad) + "\n")
    now = live.look(now_s=NOW_S)
    assert now.num_failed_in_row == 1
    assert "failing" in terminal.plain(now, name="chk")
    assert "\x1b" not in terminal.plain(now, name="chk")
