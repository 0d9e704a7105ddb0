"""A script under ``checkfreq run``, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RUN = (sys.executable, "-m", "checkfreq.cli", "run")
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
#: A namespace of processes of its own, where the supervisor is PID 1.
AS_PID_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
_LOOK_S = 0.01

#: What the scripts of the tests begin with. ``told`` is a manager's side of the board, without
#: torch; ``note`` appends to a file, ``count`` says the how manieth run this is.
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from checkfreq.supervisor.board import State
from checkfreq.supervisor.reporter import reporter_for
from tests.cli.conftest import commit
from checkfreq.store.store import CheckpointStore

here = Path({folder!r})

def note(text):
    with (here / "notes").open("a") as notes:
        print(text, file=notes)

def notes():
    return (here / "notes").read_text().splitlines() if (here / "notes").exists() else []

def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)

chk_dir = here / "chk"

def restored():
    store = CheckpointStore(chk_dir)
    told = reporter_for(chk_dir, rank=0)
    steps = store.steps() if chk_dir.exists() else []
    store.open()
    told.begin(max(steps, default=0), restored=bool(steps))
    return store, told, max(steps, default=0)

if __name__ == "__main__":
    note("run")
count = notes().count("run")
"""


def can_be_pid_1() -> bool:
    """Whether `AS_PID_1` works here."""
    return subprocess.run([*AS_PID_1, "true"], capture_output=True, check=False).returncode == 0


class Supervised:
    """One supervisor; ``options`` are its own, ``program`` is the script's text.

    ``named``: how the command names the script, in place of its path.
    """

    def __init__(
        self,
        folder: Path,
        program: str,
        *options: str,
        wrapper: Sequence[str] = (),
        python: Sequence[str] = (),
        named: str | None = None,
        arguments: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.folder = folder
        script = folder / "script.py"
        script.write_text(PRELUDE.format(folder=str(folder)) + program)
        command = [sys.executable, *python, named or str(script), *arguments]
        self.process = subprocess.Popen(
            [*wrapper, *RUN, *options, "--", *command],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **settings,
        )

    def notes(self) -> list[str]:
        """The lines that the script has written down."""
        path = self.folder / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, note: str, *, times: int = 1) -> None:
        """Return once the script has written a line so many times."""
        self.wait_until(lambda: self.notes().count(note) >= times, note)

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Return once ``holds()``; fails after the deadline, or if the supervisor ends."""
        end_s = time.monotonic() + DEADLINE_S
        while not holds():
            assert self.process.poll() is None, f"{what}: {self.process.communicate()}"
            assert time.monotonic() < end_s, what
            time.sleep(_LOOK_S)

    def send(self, number: signal.Signals) -> None:
        """Send the supervisor a signal."""
        self.process.send_signal(number)

    def end(self) -> tuple[int, list[str]]:
        """Its exit status, and the lines that it said."""
        try:
            _, errors = self.process.communicate(timeout=DEADLINE_S)
        finally:
            self.process.kill()
        prefix = "checkfreq run: "
        said = [line for line in errors.splitlines() if line.startswith(prefix)]
        self.errors = errors
        return self.process.returncode, [line.removeprefix(prefix) for line in said]


def ran(folder: Path, program: str, *options: str, **settings: Any) -> tuple[int, list[str]]:
    """Run to the end."""
    return Supervised(folder, program, *options, **settings).end()
