"""Starting, killing and reading the child processes of the crash tests.

Children are forked from a server that has imported torch once: a run costs its own time, not
the seconds of the import. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.acceptance import programs
from tests.acceptance.command import checkfreq
from tests.fork_server import FORK_SERVER

DEADLINE_S = 240.0


@dataclass
class Log:
    """What a run logged before its end."""

    restored: tuple[int, str] | None = None
    source: str | None = None
    boundaries: dict[int, str] = field(default_factory=dict)
    durable: list[int] = field(default_factory=list)
    stats: dict[str, Any] | None = None

    def note(self, message: tuple[Any, ...]) -> None:
        """Add one message."""
        kind, *values = message
        if kind == "restored":
            self.restored = (values[0], values[1])
        elif kind == "source":
            self.source = values[0]
        elif kind == "boundary":
            self.boundaries[values[0]] = values[1]
        elif kind == "durable":
            self.durable.append(values[0])
        else:
            self.stats = values[0]


class Trainer:
    """A child process that trains, and its log so far."""

    def __init__(self, run: programs.Run) -> None:
        self.log = Log()
        self._chk_dir = Path(run.chk_dir)
        self._pipe, theirs = FORK_SERVER.Pipe(duplex=False)
        self._process = FORK_SERVER.Process(target=_call, args=(theirs, run))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._process.pid is not None
        return self._process.pid

    def read_boundaries(self, count: int) -> bool:
        """Read until ``count`` more boundaries were logged; False if the run ended before."""
        goal = len(self.log.boundaries) + count
        while len(self.log.boundaries) < goal:
            if not self._read_one():
                return False
        return True

    def read_restored(self) -> tuple[int, str]:
        """Read until the run has restored; the step and its digest."""
        while self.log.restored is None:
            assert self._read_one(), "the run ended before it had restored"
        return self.log.restored

    def finish(self) -> int:
        """Read the rest of the log and return the exit code (-9 when killed)."""
        while self._read_one():
            pass
        self._process.join(DEADLINE_S)
        code = self._process.exitcode
        assert code is not None, "the training process did not end"
        self._process.close()
        self._pipe.close()
        return code

    def kill(self) -> None:
        """SIGKILL the training process."""
        _kill(self.pid)

    def kill_worker(self) -> bool:
        """SIGKILL its worker, if it has one that holds the lock; True if one was there."""
        holder = _holder(self._chk_dir)
        if holder.get("trainer_pid") != self.pid:
            return False
        _kill(holder["worker_pid"])
        return True

    def _read_one(self) -> bool:
        assert self._pipe.poll(DEADLINE_S), "the training process fell silent"
        try:
            self.log.note(self._pipe.recv())
        except (EOFError, ConnectionResetError):
            return False
        return True


def _call(log: Connection, run: programs.Run) -> None:
    programs.train(log, run)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _holder(chk_dir: Path) -> dict[str, int]:
    try:
        found: dict[str, int] = json.loads((chk_dir / ".lock").read_bytes())
    except (OSError, ValueError):
        return {}
    return found


def worker_pid(chk_dir: Path) -> int:
    """The worker that holds the directory, or held it last; waits for the first one."""
    deadline = time.monotonic() + DEADLINE_S
    while not (holder := _holder(chk_dir)):
        assert time.monotonic() < deadline, "no worker has opened the directory"
        time.sleep(0.001)
    return holder["worker_pid"]


def trainer_pid(chk_dir: Path) -> int:
    """The process that trains there."""
    return _holder(chk_dir)["trainer_pid"]


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Look again and again; ``what``: what was wrong if it never is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def wait_unlocked(chk_dir: Path) -> None:
    """Return once no worker holds the directory: the snapshots it had are committed."""
    if not (chk_dir / ".lock").exists():
        return
    fd = os.open(chk_dir / ".lock", os.O_RDWR)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert time.monotonic() < deadline, "the worker outlived its trainer for good"
                time.sleep(0.005)
            else:
                return
    finally:
        os.close(fd)


def run_to_end(run: programs.Run) -> Log:
    """Train in a child, undisturbed, and return its log."""
    trainer = Trainer(run)
    code = trainer.finish()
    assert code == 0, f"the run ended with exit code {code}"
    return trainer.log


def verify_all(chk_dir: Path) -> list[int]:
    """Assert that every step with a final name validates; returns the steps."""
    reports = checkfreq("verify", chk_dir)
    assert [one for one in reports if one["state"] != "ok"] == []
    return [one["step"] for one in reports]
