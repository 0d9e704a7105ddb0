"""A real S3 server over HTTP on this machine, as a process of its own: moto, or one of two that
differ from it.

They run in the virtual environment that ``make servers`` makes from ``requirements.txt``.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkfreq.mirror.settings import Mirror
from tests.required import require

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "checkpoints"
KEY_ID, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"
_DEADLINE_S = 60.0
_TRIES = 3
#: localbucket ignores If-Match and cannot remove several objects with one request; rclone answers a
#: request for a part of an object with all of it.
_COMMANDS = {
    "moto": "python -m moto.server -H 127.0.0.1 -p {port}",
    "localbucket": "localbucket --port {port} {buckets}",
    "rclone": "rclone --config {null} serve s3 --addr 127.0.0.1:{port} --auth-key {key} {buckets}",
}


@dataclass(frozen=True)
class S3Server:
    """Where a server listens. ``port=``: another port to reach it at, a proxy's."""

    port: int

    def options(self, *, port: int | None = None) -> Mapping[str, str | bool]:
        """What a ``Mirror`` needs to reach it."""
        return {
            "endpoint": f"http://127.0.0.1:{port or self.port}",
            "allow_http": True,
            "region": "us-east-1",
            "access_key_id": KEY_ID,
            "secret_access_key": SECRET,
        }

    def variables(self, *, port: int | None = None) -> dict[str, str]:
        """The same as variables of the environment."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def mirror(self, prefix: str, *, port: int | None = None) -> Mirror:
        """A mirror under a prefix of the bucket."""
        return Mirror(f"s3://{BUCKET}/{prefix}", options=self.options(port=port))


@contextlib.contextmanager
def running(folder: Path, name: str = "moto", **environment: str) -> Iterator[S3Server]:
    """A server with an empty bucket; skips, or fails where it must run, if it does not start."""
    binaries = Path(os.environ.get("CHECKFREQ_SERVERS", ROOT / ".venv-servers")) / "bin"
    program, *words = _COMMANDS[name].split()
    if not (binaries / program).exists():
        require("s3", f"no S3 server: {binaries / program} is not there (make servers)")
    buckets = folder / "buckets"
    (buckets / BUCKET).mkdir(parents=True)  # moto keeps its own in memory
    for _ in range(_TRIES):
        port = _free_port()
        values = {"port": port, "buckets": buckets, "key": f"{KEY_ID},{SECRET}", "null": os.devnull}
        with (folder / "s3-server.log").open("ab") as log:
            command = [str(binaries / program), *(word.format(**values) for word in words)]
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **environment}
            )
        try:
            if _answers(process, port):
                _request(port, "PUT", f"/{BUCKET}")
                yield S3Server(port)
                return
        finally:
            process.kill()
            process.wait(_DEADLINE_S)
    said = (folder / "s3-server.log").read_text(errors="replace")[-2000:]
    require("s3", f"the S3 server did not start: {said}")


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Whether the server answers; False if it ended, for example since the port was taken."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            _request(port, "GET", "/")
            return process.poll() is None
        time.sleep(0.05)
    return False


def _request(port: int, method: str, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        connection.getresponse().read()
    finally:
        connection.close()
