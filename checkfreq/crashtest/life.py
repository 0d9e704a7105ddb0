"""One life of the script: started with a plan, watched, killed at an instant, waited for.

The processes of a life are those whose environment names its folder: ranks, loader workers and
the persist worker, wherever they are in the tree.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import checkfreq
from checkfreq.crashtest.history import Record, read
from checkfreq.crashtest.plan import SENT, VARIABLE, Plan, started
from checkfreq.errors import ConfigError
from checkfreq.supervisor.command import NotPythonError, python_command

_LOOK_S = 0.004
_TAIL_BYTES = 8000
#: How long the other ranks and the launcher may take to end after a kill.
_AFTER_KILL_S = 8.0
_AFTER_SIGNAL_S = 120.0
_LINE = re.compile(rb'^\{"kind": "(\w+)", "step": (\d+)', re.MULTILINE)
_WORKER = b"checkfreq.persist.worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """When and whom. ``at_step``: once rank 0 has passed it, and ``delay_s`` later; -1: ``delay_s``
    after the script's first line, while it starts. ``is_lost``: the machine is lost, with every
    process, the persist worker and what it holds in memory included.
    """

    at_step: int
    delay_s: float = 0.0
    signal: int = signal.SIGKILL
    rank: int = 0
    is_group: bool = False
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Lived:
    """How a life went. ``code``: the exit status of the command, negative for a signal."""

    code: int
    was_killed: bool
    tail: str
    seconds: float
    plan: Plan
    records: dict[int, Record] = field(default_factory=dict)

    @property
    def main(self) -> Record:
        """Rank 0's record."""
        return self.records.get(0) or Record()


class OverdueError(Exception):
    """A life did not end within the time limit."""


def on_ranks(command: Sequence[str], ranks: int) -> list[str]:
    """The command under torchrun. Raises ConfigError for one that torchrun cannot start."""
    if ranks == 1:
        return [*command]
    try:
        parts = python_command(command)
    except NotPythonError as error:
        raise ConfigError(
            f"--ranks {ranks}: expected a command such as python train.py, to be started by "
            f"torchrun; {error}. Give a script that starts its ranks itself without --ranks"
        ) from None
    module = ["-m"] if parts.is_module else []
    return [
        *(parts.executable, *parts.options, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), *module, parts.name, *parts.arguments),
    ]


def run(
    command: Sequence[str], folder: Path, plan: Plan, *, kill: Kill | None, timeout_s: float
) -> Lived:
    """Start the command, kill it as told, and wait for its end."""
    folder.mkdir(parents=True)
    plan.write(folder)
    start_s = time.monotonic()
    try:
        process = subprocess.Popen(
            [*command],
            env=_environment(folder, plan),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]!r}: {error.strerror}") from None
    tail = _Tail(process)
    try:
        watch = _Watch(process, folder, end_s=start_s + timeout_s)
        was_killed = kill is not None and _carry_out(kill, watch)
        watch.wait_for_end(_after(kill) if was_killed else timeout_s)
        if process.poll() is None and not was_killed:
            raise OverdueError(
                f"the script did not end within {timeout_s:.0f} s; --timeout gives it longer"
            )
    finally:
        _end(folder, with_worker=kill is not None and (kill.is_lost or kill.is_group))
        process.wait()
        tail.join()
    return Lived(
        process.returncode,
        was_killed,
        tail.text(),
        time.monotonic() - start_s,
        plan,
        read(folder),
    )


def end_all(root: Path) -> None:
    """End every process of a crash test, persist workers that wait for a next run included."""
    for pid in _processes(root):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _environment(folder: Path, plan: Plan) -> dict[str, str]:
    inject = str(Path(__file__).parent / "inject")
    package = str(Path(checkfreq.__file__).parents[1])
    given = os.environ.get("PYTHONPATH", "")
    path = [inject, *([given] if given else []), package]
    return {
        **os.environ,
        VARIABLE: str(folder),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", str(plan.hash_seed)),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _after(kill: Kill | None) -> float:
    assert kill is not None
    return _AFTER_KILL_S if kill.signal == signal.SIGKILL else _AFTER_SIGNAL_S


class _Tail:
    """Reads the script's output, so that it never waits for us, and keeps the end of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._data = b""
        self._process = process
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                self._data = (self._data + data)[-_TAIL_BYTES:]

    def join(self) -> None:
        """Read to the end, once the command has ended; a worker that lingers may hold the pipe."""
        self._thread.join(timeout=1.0)

    def text(self) -> str:
        """The last lines."""
        return self._data.decode(errors="replace")


class _Watch:
    """What the script has recorded so far, without reading it all again."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, *, end_s: float) -> None:
        self._process = process
        self._path = folder / "record-0.jsonl"
        self._folder = folder
        self._end_s = end_s
        self._offset = 0
        self.step = -1
        self.has_begun = False

    def look(self) -> None:
        """Read what was added."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.has_begun = self.has_begun or bool(whole)
        for kind, step in _LINE.findall(whole):
            if kind in (b"step", b"passed", b"held"):
                self.step = max(self.step, int(step))

    def tell_sent(self) -> None:
        """Let a script go on that waits for the signal: it may not die of it."""
        (self._folder / SENT).touch()

    def until(self, reached: Callable[[], bool]) -> bool:
        """Wait until that holds; False if the script ended first."""
        while not reached():
            if self._process.poll() is not None or time.monotonic() > self._end_s:
                return False
            time.sleep(_LOOK_S)
            self.look()
        return True

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait for the command's end, at most so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def processes(self) -> set[int]:
        """Every process of the life, ranks first known by what they recorded."""
        return {*_processes(self._folder), *_recorded(self._folder)}

    def rank(self, number: int) -> int:
        """The process of a rank; the command's if it has told nothing yet."""
        record = read(self._folder).get(number)
        return record.pid if record is not None and record.pid else self._process.pid


def _carry_out(kill: Kill, watch: _Watch) -> bool:
    """Wait for the instant, and kill. False if the script ended first."""
    if kill.at_step < 0:
        there = watch.until(lambda: watch.has_begun)
    else:
        there = watch.until(lambda: watch.step >= kill.at_step)
    if not there:
        return False
    if kill.delay_s:
        time.sleep(kill.delay_s)
    pids = watch.processes() if kill.is_group or kill.is_lost else [watch.rank(kill.rank)]
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, kill.signal)
    watch.tell_sent()
    return True


def _end(folder: Path, *, with_worker: bool) -> None:
    """End what is left of a life; the persist worker may finish, and wait for the next one."""
    for pid in {*_processes(folder), *_recorded(folder)}:
        if with_worker or not _is_worker(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _processes(folder: Path) -> Iterator[int]:
    """Processes whose environment names the folder, or one inside of it."""
    wanted = f"{VARIABLE}={folder}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                environ = file.read().split(b"\0")
        except OSError:
            continue
        if any(one == wanted or one.startswith(wanted + b"/") for one in environ):
            yield int(entry)


def _recorded(folder: Path) -> Iterator[int]:
    """The ranks: one that is a fork shows the environment of the process that it is a fork of."""
    for record in read(folder).values():
        if record.pid and started(record.pid) == record.started:
            yield record.pid


def _is_worker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _WORKER in file.read()
    except OSError:
        return False
