"""The packages of an image, from where this environment's pip finds them, on loopback."""

from __future__ import annotations

import contextlib
import functools
import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 300.0


def fill(folder: Path, *packages: str, dependencies: bool = True) -> None:
    """Put the wheels of these, and by default of what they need, into an index in this folder."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"),
        *("--constraint", "constraints.txt", "--dest", str(folder)),
        *(() if dependencies else ("--no-deps",)),
    ]
    done = subprocess.run(
        [*command, *packages],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    for wheel in sorted(folder.glob("*.whl")):
        project = re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
        (folder / project).mkdir(exist_ok=True)
        wheel.rename(folder / project / wheel.name)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of an index: a listing of each folder is a page as pip reads it."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """A server that does not report each request."""

    def log_message(self, format: str, *args: object) -> None: ...
