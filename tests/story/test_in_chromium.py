"""The report and the live page in a browser: light, dark, no complaints."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from checkfreq.cli import main
from checkfreq.story.live import Live
from checkfreq.story.watch.server import WatchServer
from tests.story.made import START_S, two_runs, write

pytestmark = pytest.mark.more

_PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """Headless Chromium. ``said``: what pages logged to the console."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.said: list[str] = []

    def open(self, url: str, *options: str) -> str:
        """Open a page; returns its document as it is after a few seconds."""
        assert _PROGRAM is not None
        done = subprocess.run(
            [
                *(_PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *(f"--user-data-dir={self._folder / 'profile'}", "--enable-logging=stderr"),
                *("--virtual-time-budget=4000", "--dump-dom", *options, url),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={**os.environ, "HOME": str(self._folder)},
        )
        self.said += [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return done.stdout

    def picture(self, url: str, *options: str, width: int) -> Image.Image:
        """What a window of this width shows."""
        path = self._folder / "picture.png"
        self.open(url, f"--screenshot={path}", f"--window-size={width},2400", *options)
        return Image.open(path).convert("L")


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    if _PROGRAM is None:
        pytest.skip("no chromium is installed (apt-get install chromium)")
    return Browser(tmp_path)


def report(tmp_path: Path, events: object) -> str:
    chk_dir = write(tmp_path / "chk", events)  # type: ignore[arg-type]
    path = tmp_path / "report.html"
    assert main(["report", str(chk_dir), "--out", str(path)]) == 0
    return path.as_uri()


def brightness(picture: Image.Image) -> float:
    return sum(picture.resize((40, 40)).tobytes()) / 1600


def test_a_report_is_light_or_dark_as_the_reader_has_it(browser: Browser, tmp_path: Path) -> None:
    url = report(tmp_path, two_runs())
    assert brightness(browser.picture(url, width=1000)) > 200
    dark = browser.picture(url, "--blink-settings=preferredColorScheme=0", width=1000)
    assert brightness(dark) < 80
    assert browser.said == []


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    live = Live(write(tmp_path / "live", two_runs()))
    server = WatchServer(lambda: live.look(now_s=START_S + 125), name="<i>chk</i>", port=0)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    yield server.url
    server.close()
    thread.join(30)


def test_the_live_page_shows_the_figures(browser: Browser, url: str) -> None:
    document = browser.open(url)
    assert "iteration 160, 10.8 s ago" in document
    assert "&lt;i&gt;chk&lt;/i&gt;</h1>" in document
    assert browser.said == []
