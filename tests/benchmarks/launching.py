"""Runs the training script under torch's launchers, and looks on while it trains."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 400.0

TORCHRUN = ("torch.distributed.run", "--standalone")
LAUNCH = ("torch.distributed.launch",)


@dataclass(frozen=True, slots=True)
class Launch:
    """``ranks`` processes of ``checkfreq.examples.imagenet``, in a folder of its own."""

    folder: Path
    flags: tuple[str, ...]
    launcher: tuple[str, ...] = TORCHRUN
    ranks: int = 3

    @contextlib.contextmanager
    def started(self, *flags: str) -> Iterator[Running]:
        """The launcher and its ranks; all are gone when the block ends."""
        self.folder.mkdir(exist_ok=True)
        history = self.folder / "history"
        history.unlink(missing_ok=True)
        os.mkfifo(history)
        opened = os.open(history, os.O_RDWR)  # ranks that come and go neither block nor end it
        command = [sys.executable, "-W", "ignore", "-m", *self.launcher]
        command += ["--nproc-per-node", str(self.ranks), "-m", "checkfreq.examples.imagenet"]
        command += [*self.flags, "--report", str(self.folder / "report")]
        command += ["--history", str(history), "--chk-prefix", str(self.folder / "chk"), *flags]
        with (self.folder / "log").open("ab") as log:
            launcher = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=log, stderr=log
            )
            running = Running(self, launcher, opened)
            try:
                yield running
            finally:
                running.kill_all()
                os.close(opened)

    def run(self, *flags: str) -> dict[str, Any]:
        """Train to the end; the report."""
        with self.started(*flags) as running:
            assert running.returncode() == 0, self.log()
        return self.report()

    def report(self) -> dict[str, Any]:
        """What the first rank wrote at the end."""
        report: dict[str, Any] = json.loads((self.folder / "report").read_text())
        return report

    def log(self) -> str:
        """What launcher and ranks printed."""
        return (self.folder / "log").read_text(errors="replace")


class Running:
    """Ranks that train. ``history`` is what the first one wrote down so far."""

    def __init__(self, launch: Launch, launcher: subprocess.Popen[bytes], opened: int) -> None:
        self._launch, self._launcher, self._opened = launch, launcher, opened
        self._rest = b""
        self.history: list[dict[str, Any]] = []

    def wait_for_step(self, step: int) -> None:
        """Return once that update was made."""
        while not any(line.get("step") == step for line in self.history):
            readable, _, _ = select.select([self._opened], [], [], DEADLINE_S)
            assert readable, f"no step {step} within {DEADLINE_S} s: {self._launch.log()[-4000:]}"
            self._read()

    def returncode(self) -> int:
        """The launcher's, at the end, which comes before the deadline."""
        try:
            ended = self._launcher.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end: {self._launch.log()[-4000:]}") from None
        if select.select([self._opened], [], [], 0)[0]:
            self._read()
        return ended

    def stop_ranks(self) -> None:
        """Tell the ranks to stop, as a scheduler does that warns of an end; not the launcher."""
        for pid in self._children():
            os.kill(pid, signal.SIGUSR1)

    def kill(self, rank: int) -> None:
        """SIGKILL one rank."""
        (pid,) = [pid for pid in self._children() if _is_rank(pid, rank)]
        os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """SIGKILL the launcher, then its ranks: nobody starts new ones."""
        children = self._children() if self._launcher.poll() is None else []
        self._launcher.kill()
        self._launcher.wait()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _children(self) -> list[int]:
        listed = Path(f"/proc/{self._launcher.pid}/task").glob("*/children")
        return [int(pid) for one in listed for pid in one.read_text().split()]

    def _read(self) -> None:
        *lines, self._rest = (self._rest + os.read(self._opened, 1 << 16)).split(b"\n")
        self.history += [json.loads(line) for line in lines]


def _is_rank(pid: int, rank: int) -> bool:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return f"RANK={rank}".encode() in variables


def environment() -> dict[str, str]:
    """What launcher and ranks need: our sources, one thread each, loopback."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Restarted ranks otherwise find keys of the life before in the launcher's own store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
