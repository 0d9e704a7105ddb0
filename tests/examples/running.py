"""Runs the programs of ``checkfreq/examples`` as a user would, and kills them while they train.

When to kill one is decided by its checkpoint directory: after the first checkpoint is durable.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

import torch

from tests.benchmarks.launching import ROOT, TORCHRUN, environment
from tests.fork_server import FORK_SERVER

PACKAGE = "checkfreq.examples"
DEADLINE_S = 240.0
#: Lines that examples print, as opposed to those of checkfreq, torchrun and a rank that is killed.
SAID = re.compile(r"^(?:epoch|step|each|best|digest)\b.*", re.MULTILINE)


class Running(Protocol):
    """An example that was started."""

    def ended(self, timeout_s: float) -> bool:
        """Whether it has ended, or does so within ``timeout_s``."""
        ...

    def kill(self, dice: random.Random) -> None:
        """SIGKILL it, or one of its ranks."""
        ...

    def exit_code(self) -> int | None:
        """Its exit status, once it has ended; negative if a signal ended it."""
        ...

    def close(self) -> None:
        """Kill whatever still runs."""
        ...


class Forked:
    """One process, forked from a server that has imported torch: a run costs its own time."""

    def __init__(self, name: str, arguments: list[str], output: Path) -> None:
        self._process: BaseProcess = FORK_SERVER.Process(
            target=run_in_fork, args=(name, arguments, output)
        )
        self._process.start()
        assert self._process.pid is not None
        self._pid = self._process.pid

    def ended(self, timeout_s: float) -> bool:
        return bool(wait([self._process.sentinel], timeout_s))

    def kill(self, dice: random.Random) -> None:
        self._process.kill()

    def exit_code(self) -> int | None:
        self._process.join(DEADLINE_S)
        return self._process.exitcode

    def close(self) -> None:
        """A loader worker whose trainer dies as it starts takes init for its parent, and stays."""
        self._process.kill()
        self._process.join()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


def run_in_fork(name: str, arguments: list[str], output: Path) -> None:
    """The process: ``python -W error -m checkfreq.examples.<name> <arguments>``."""
    os.setpgid(0, 0)
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    multiprocessing.set_start_method("fork", force=True)  # for loaders, as outside of a fork server
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
    torch.set_num_threads(1)
    sys.argv = [name, *arguments]
    runpy.run_module(f"{PACKAGE}.{name}", run_name="__main__")


class Launched:
    """Ranks under torchrun, which starts all of them again when one is killed."""

    def __init__(self, name: str, arguments: list[str], output: Path, *, ranks: int) -> None:
        # One for the kill. Under load a rank of FSDP2 was also seen to abort in torch's exit, when
        # it had printed all ("terminate called without an active exception").
        command = [sys.executable, "-W", "ignore", "-m", *TORCHRUN, "--max-restarts", "3"]
        command += ["--nproc-per-node", str(ranks), "-m", f"{PACKAGE}.{name}", *arguments]
        with output.open("a") as file:
            self._launcher = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment() | {"PYTHONUNBUFFERED": "1"},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def ended(self, timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(timeout_s)
        return self._launcher.returncode is not None

    def kill(self, dice: random.Random) -> None:
        ranks = self._ranks()
        dice.shuffle(ranks)
        kill_all(ranks[:1])

    def exit_code(self) -> int | None:
        return self._launcher.wait(DEADLINE_S)

    def close(self) -> None:
        ranks = self._ranks()
        self._launcher.kill()
        self._launcher.wait()
        kill_all(ranks)

    def _ranks(self) -> list[int]:
        if self.ended(0.0):
            return []
        listed = Path(f"/proc/{self._launcher.pid}/task").glob("*/children")
        return [int(pid) for one in listed for pid in one.read_text().split()]


def kill_all(pids: list[int]) -> None:
    """SIGKILL those that still live."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Example:
    """One program, with its arguments after the checkpoint directory, on so many ranks."""

    name: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1

    def started(self, folder: Path) -> contextlib.closing[Running]:
        """The program, whose checkpoints are in ``folder / "chk"``."""
        folder.mkdir(exist_ok=True)
        arguments = [str(folder / "chk"), *self.arguments]
        output = folder / "output"
        if self.ranks == 1:
            return contextlib.closing(Forked(self.name, arguments, output))
        return contextlib.closing(Launched(self.name, arguments, output, ranks=self.ranks))

    def run(self, folder: Path) -> float:
        """Run it to its end; returns the seconds since its first checkpoint."""
        with self.started(folder) as running:
            await_checkpoint(running, folder)
            since_s = time.monotonic()
            assert running.exit_code() == 0, output_of(folder)
            return time.monotonic() - since_s

    def run_killed(self, folder: Path, *, within_s: float, dice: random.Random) -> bool:
        """Kill it at a random instant, and run it to its end; False if it ended before the kill."""
        with self.started(folder) as running:
            await_checkpoint(running, folder)
            if not running.ended(dice.uniform(0.0, within_s)):
                running.kill(dice)
            if self.ranks > 1:  # which the launcher starts again
                assert running.exit_code() == 0, output_of(folder)
            elif running.exit_code() == -signal.SIGKILL:
                self.run_again(folder)
        return "restored step" in output_of(folder)

    def run_again(self, folder: Path) -> None:
        """Start it where there are checkpoints, and let it end."""
        with self.started(folder) as running:
            assert running.exit_code() == 0, output_of(folder)


def await_checkpoint(running: Running, folder: Path) -> None:
    """Return when the first checkpoint is durable."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not list((folder / "chk").glob("step-*")):
        assert time.monotonic() < deadline_s, output_of(folder)
        if running.ended(0.005):
            break


def output_of(folder: Path) -> str:
    """Everything that its runs printed."""
    return (folder / "output").read_text(errors="replace")


def said_in(folder: Path) -> list[str]:
    """The lines that the example itself printed, in all its runs there."""
    return SAID.findall(output_of(folder))
