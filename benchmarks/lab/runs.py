"""A training by `checkfreq.examples.imagenet` in a separate process, and SIGKILL at given times.

`Run` starts, watches and reads one. `survive` kills it at given times and starts it again with the
same command until it is done. The whole process group of the trainer is killed, with its loader
workers: a worker that is just being forked never notices that the trainer is gone (torch 2.13). Its
persist worker has its own session, and finishes what it is writing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab.events import events, read_lines

ROOT = Path(__file__).resolve().parents[2]


class Run:
    """One training in its own folder: started, watched and possibly killed.

    ``flags`` are those of ``module``, which accepts at least `checkfreq.examples.imagenet`'s output
    options. After ``deadline_s`` (monotonic clock) `wait` ends this process. ``starts_unix_s``: the
    time of each start.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        *,
        deadline_s: float = float("inf"),
        module: str = "checkfreq.examples.imagenet",
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.chk_dir = folder / "chk"
        self.starts_unix_s: list[float] = []
        self._history, self._report = folder / "history.jsonl", folder / "report.json"
        self._log = folder / "log.txt"
        self._limit_s, self._deadline_s = deadline_s - time.monotonic(), deadline_s
        self._command = [
            *(sys.executable, "-m", module, *flags),
            *("--chk-prefix", str(self.chk_dir.resolve())),
            *("--history", str(self._history.resolve()), "--report", str(self._report.resolve())),
        ]

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The trainer, in a process that is gone when the block ends."""
        search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": search}
        self.starts_unix_s.append(time.time())
        with self._log.open("ab") as log:
            trainer = subprocess.Popen(
                self._command, stdout=log, stderr=log, cwd=ROOT, env=environment, process_group=0
            )
            try:
                yield trainer
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(trainer.pid, signal.SIGKILL)
                trainer.wait()

    def finish(self) -> float:
        """Train to the end; returns the seconds it took."""
        began_s = time.monotonic()
        with self.started() as trainer:
            self.wait(lambda: trainer.poll() is not None, trainer, poll_s=0.1)
            self.check(trainer)
        return time.monotonic() - began_s

    def wait(
        self,
        condition: Callable[[], bool],
        trainer: subprocess.Popen[bytes],
        *,
        poll_s: float = 0.0005,
    ) -> None:
        """Poll until ``condition`` holds; ends this process if trainer or time ends first."""
        while not condition():
            if trainer.poll() is not None and not condition():
                self._fail(f"the trainer ended early, with status {trainer.returncode}")
            if time.monotonic() > self._deadline_s:
                self._fail(f"the training did not end within {self._limit_s:.0f} s")
            time.sleep(poll_s)

    def abandon(self) -> None:
        """Have `wait`, in whatever thread, end the trainer."""
        self._deadline_s = float("-inf")

    def check(self, trainer: subprocess.Popen[bytes]) -> None:
        """End this process if the trainer failed."""
        if trainer.returncode != 0:
            self._fail(f"the trainer ended with status {trainer.returncode}")

    def _fail(self, why: str) -> None:
        tail = self._log.read_text(errors="replace").splitlines()[-20:]
        raise SystemExit("\n".join([f"{why}; the end of {self._log}:", *tail]))

    def updates(self) -> list[dict[str, Any]]:
        """The lines of all updates, in order."""
        return [line for line in read_lines(self._history) if "batch" in line]

    def steps(self) -> list[int]:
        """The iterations in order, redone ones included."""
        return [line["step"] for line in self.updates()]

    def last_step(self) -> int:
        """The newest iteration; 0 before the first."""
        lines = read_lines(self._history, last_bytes=4096)
        return next((line["step"] for line in reversed(lines) if "step" in line), 0)

    def epoch_ends(self) -> list[dict[str, Any]]:
        """The data ledger at the end of every epoch."""
        return [line for line in read_lines(self._history) if "exactly_once" in line]

    def ready_unix_s(self) -> list[float]:
        """When each process had finished its imports, opened its data and built its model."""
        lines = read_lines(self._history)
        return [line["ready_unix_s"] for line in lines if "ready_unix_s" in line]

    def report(self) -> dict[str, Any]:
        """The report that the run wrote at its end."""
        report: dict[str, Any] = json.loads(self._report.read_text())
        return report

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events that checkfreq wrote."""
        return events(self.chk_dir, kind)

    def being_written(self) -> int | None:
        """The step of the checkpoint that is being written right now."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.chk_dir):
                if name.startswith(".tmp-"):
                    return int(name.split("-")[1])
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """How a run ended: finished, or given up. ``seconds`` include every restart."""

    seconds: float
    kills: int
    finished: bool


def survive(run: Run, kills_s: Iterable[float], *, limit_s: float) -> Survival:
    """Train to the end, killed at each of ``kills_s`` and started again; given up at ``limit_s``.

    Both are seconds since the first start; ``kills_s`` are ascending and may be endless. A kill
    that comes when the trainer has just finished does not count.
    """
    began_s, num_kills = time.monotonic(), 0
    rising = iter(kills_s)
    while True:
        kill_s = next(rising, float("inf"))
        with run.started() as trainer:
            is_done = _ends_within(trainer, began_s + min(kill_s, limit_s) - time.monotonic())
        if is_done or trainer.returncode != -signal.SIGKILL:
            run.check(trainer)
            is_done = True
        seconds = time.monotonic() - began_s
        if is_done or kill_s >= limit_s:
            return Survival(seconds=seconds, kills=num_kills, finished=is_done)
        num_kills += 1


def _ends_within(trainer: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        trainer.wait(None if seconds == float("inf") else max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return False
    return True
