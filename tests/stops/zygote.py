"""A process that has imported everything and forks trainers, which end as a Python ends.

Unlike a child of ``multiprocessing``, a trainer forked here returns from its main program: its
interpreter is finalised, and its exit status is what a launcher would see. ``Zygote`` is its
client. Standard input takes one life a line, standard output says who started and how it ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # torch.optim imports it at its first step

from tests.stops import program
from tests.stops.program import Life

ROOT = Path(__file__).resolve().parents[2]


class Zygote:
    """Starts trainers and knows how they ended."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )
        self._rest = b""
        self._started: list[int] = []
        self._ended: dict[int, int] = {}

    def start(self, life: Life, *, group: int | None = None) -> int:
        """Process id of the trainer, in a process group of its own, or in that of ``group``."""
        assert self._process.stdin is not None
        request = {"group": group, "life": asdict(life)}
        self._process.stdin.write((json.dumps(request) + "\n").encode())
        self._process.stdin.flush()
        self._read(lambda: bool(self._started), limit_s=120.0)
        return self._started.pop()

    def status(self, pid: int, *, limit_s: float) -> int | None:
        """Its exit status (negative: the signal that ended it); None if it runs after all."""
        self._read(lambda: pid in self._ended, limit_s=limit_s)
        return self._ended.get(pid)

    def close(self) -> None:
        """End the process. Trainers should have ended before."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30.0)
        self._process.stdout.close()

    def _read(self, is_done: Any, *, limit_s: float) -> None:
        assert self._process.stdout is not None
        end_s = time.monotonic() + limit_s
        while not is_done():
            left_s = max(0.0, end_s - time.monotonic())
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                return
            text = os.read(self._process.stdout.fileno(), 65536)
            assert text, "the zygote is dead"
            *lines, self._rest = (self._rest + text).split(b"\n")
            for line in map(json.loads, lines):
                if "status" in line:
                    self._ended[line["pid"]] = line["status"]
                else:
                    self._ended.pop(line["pid"], None)  # of an earlier trainer with this number
                    self._started.append(line["pid"])


def serve() -> Life:
    """Fork trainers until standard input ends; returns in each of them, with its life."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    gc.collect()
    gc.freeze()  # or each trainer's collector would copy all of it
    rest = b""
    while True:
        ready = select.select([0, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _reap()
        if 0 not in ready:
            continue
        text = os.read(0, 65536)
        if not text:
            sys.exit(0)
        *lines, rest = (rest + text).split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (woken, wake):
                    os.close(end)
                return _begin(Life(**request["life"]))
            os.setpgid(pid, request["group"] or pid)
            _say(pid=pid)


def _begin(life: Life) -> Life:
    """Standard streams of its own."""
    log = os.open(life.log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, theirs)
    for ours in (nothing, log):
        os.close(ours)
    return life


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _say(pid=pid, status=os.waitstatus_to_exitcode(status))


def _say(**values: int) -> None:
    os.write(1, (json.dumps(values) + "\n").encode())


def _run(life: Life) -> None:
    if life.is_finalised:
        return program.main(life)
    status: Any = 0
    try:
        program.main(life)
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _run(serve())
