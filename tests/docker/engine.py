"""A Docker engine of our own, started by hand: no bridge, no packet rules, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PROGRAMS = ("dockerd", "docker", "containerd")
_STARTS_S = 30.0
_LIMIT_S = 800.0  # below what pytest gives a test: beside other work the demo takes minutes
_OPTIONS = (
    *("--bridge=none", "--iptables=false", "--ip6tables=false"),
    *("--ip-forward=false", "--ip-masq=false"),
)


class NoEngineError(Exception):
    """An engine cannot run here; the message says why."""


class Engine:
    """A running engine, by docker's commands."""

    def __init__(self, socket: Path) -> None:
        self._environment = {
            **os.environ,
            "DOCKER_HOST": f"unix://{socket}",
            "DOCKER_BUILDKIT": "0",  # its plug-in is not part of Debian's package
        }

    def run(self, *command: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of docker; what it said is in the failure."""
        done = subprocess.run(
            ["docker", *command],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
        )
        assert not check or done.returncode == 0, f"docker {command[0]}: {done.stdout[-6000:]}"
        return done

    def inspect(self, name: str, what: str) -> str:
        """One value of a container or an image, as a Go template names it."""
        return self.run("inspect", "--format", f"{{{{{what}}}}}", name).stdout.strip()

    def remove_containers(self) -> None:
        """End and remove all of them."""
        for name in self.run("ps", "--all", "--quiet").stdout.split():
            self.run("rm", "--force", "--volumes", name)


@contextlib.contextmanager
def started() -> Iterator[Engine]:
    """An engine with a folder of its own; both are gone at the end. NoEngineError says why not."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        raise NoEngineError(f"no {', '.join(missing)} on PATH (apt: docker.io iptables)")
    if os.geteuid() != 0:
        raise NoEngineError("dockerd needs root")
    folder = Path(tempfile.mkdtemp(prefix="dockerd-"))  # a socket's path must be short
    try:
        with (folder / "log").open("wb") as log:
            daemon = subprocess.Popen(_command(folder), stdout=log, stderr=log, process_group=0)
        try:
            engine = Engine(folder / "socket")
            _wait(engine, daemon, folder)
            try:
                yield engine
            finally:
                engine.remove_containers()
        finally:
            daemon.terminate()  # containerd, its child, ends with it
            daemon.wait(timeout=60)
    finally:
        _unmount_below(folder)
        shutil.rmtree(folder)


def _command(folder: Path) -> list[str]:
    return [
        *("dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"),
        *("--pidfile", f"{folder}/pid", "--host", f"unix://{folder}/socket", *_OPTIONS),
    ]


def _wait(engine: Engine, daemon: subprocess.Popen[bytes], folder: Path) -> None:
    end_s = time.monotonic() + _STARTS_S
    while engine.run("version", check=False).returncode != 0:
        if daemon.poll() is not None or time.monotonic() > end_s:
            last = (folder / "log").read_text(errors="replace").splitlines()[-1:]
            raise NoEngineError(f"dockerd does not start: {''.join(last)}")
        time.sleep(0.1)


def _unmount_below(folder: Path) -> None:
    """Namespaces of networks, and what a container that was killed had mounted."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((m for m in mounts if m.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=True)
