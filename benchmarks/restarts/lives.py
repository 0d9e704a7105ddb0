"""A training that is killed and starts again: by this process, or by ``checkfreq run``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.lab.events import events, read_lines
from benchmarks.restarts import training
from benchmarks.restarts.parts import Restart, restart_of

_POLL_S = 0.01
#: A standby that used no processor for so long has imported everything.
_IDLE_S = 0.5
_TAIL = 30


class Lives:
    """One training in its own folder, through all of its processes.

    ``tree`` holds the packages that it imports. ``under``: what starts the script and starts it
    again; nothing: this process does. ``limit_s``: the longest wait for any instant.
    """

    def __init__(
        self,
        folder: Path,
        options: Sequence[str],
        *,
        tree: Path,
        under: Sequence[str] = (),
        limit_s: float,
    ) -> None:
        folder.mkdir(parents=True)
        self._chk_dir, self._file = folder / "chk", folder / "marks.jsonl"
        self._log, self._limit_s = folder / "log.txt", limit_s
        self._restarts_itself, self._num_seen = bool(under), 0
        script = [sys.executable, str(Path(training.__file__).resolve())]
        paths = ["--marks", str(self._file), "--chk-dir", str(self._chk_dir)]
        self._command = [*under, *script, *paths, *options]
        self._environment = {**os.environ, "PYTHONPATH": str(tree)}
        # Users have it; without, every process compiles every source.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def begun(self) -> Iterator[Lives]:
        """The training until it waits for the first time; it is over when the block ends."""
        try:
            self._start()
            self._wait_for("waiting")
            yield self
        finally:
            self._end()

    def kill(self) -> Restart:
        """SIGKILL, and the restart that follows, until the new process waits too."""
        marks = read_lines(self._file)
        self._num_seen, trainer = len(marks), marks[-1]["pid"]
        if "--standby" in self._command:
            self._wait_for_standby(trainer)
        loaders = _loader_workers(trainer)
        killed_s = time.monotonic()
        os.kill(trainer, signal.SIGKILL)
        if not self._restarts_itself:
            assert self._process is not None
            self._process.wait()
            self._start()
        for pid in loaders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        waiting = self._wait_for("waiting")
        held_s = self._held_s(waiting["committed"])
        return restart_of(self._new_marks(), killed_s=killed_s, held_s=held_s)

    def _held_s(self, count: int) -> list[float]:
        """How long the last ``count`` checkpoints held training, oldest first."""
        committed = events(self._chk_dir, "committed")
        return [event["stall_s"] for event in committed if "stall_s" in event][-count:]

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, process_group=0
            )

    def _wait_for_standby(self, trainer: int) -> None:
        """Until the process that was started beside the trainer is there, and waits."""
        assert self._process is not None
        deadline_s, before = time.monotonic() + self._limit_s, -1.0
        while time.monotonic() < deadline_s:
            others = [pid for pid in _children(self._process.pid) if pid != trainer]
            used_s = sum(map(_cpu_s, others))
            if others and used_s == before:
                return
            before = used_s
            time.sleep(_IDLE_S)
        self._fail(f"no standby waits within {self._limit_s:.0f} s")

    def _new_marks(self) -> list[dict[str, Any]]:
        """Those since the last kill."""
        return read_lines(self._file)[self._num_seen :]

    def _wait_for(self, name: str) -> dict[str, Any]:
        """The mark of that name by the process that started last."""
        assert self._process is not None
        deadline_s = time.monotonic() + self._limit_s
        while not (found := [mark for mark in self._new_marks() if mark["mark"] == name]):
            if self._process.poll() is not None:
                self._fail(f"no {name!r}: it ended with status {self._process.returncode}")
            if time.monotonic() > deadline_s:
                self._fail(f"no {name!r} within {self._limit_s:.0f} s")
            time.sleep(_POLL_S)
        return found[0]

    def _fail(self, why: str) -> None:
        tail = self._log.read_text(errors="replace").splitlines()[-_TAIL:]
        raise SystemExit("\n".join([f"{why}; the end of {self._log}:", *tail]))

    def _end(self) -> None:
        """Told to stop, it leaves no worker behind; what does not listen is killed."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _loader_workers(trainer: int) -> list[int]:
    """Children in the trainer's session: a loader worker that is being forked survives it."""
    session = os.getsid(trainer)
    return [pid for pid in _children(trainer) if _session(pid) == session]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far; 0.0 once it is gone."""
    try:
        _, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return 0.0
    user, system = rest.split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def packages_at(revision: str, root: Path, into: Path) -> Path:
    """The packages of a revision of the repository at ``root``, in ``into``.

    Raises OSError if the repository does not have it.
    """
    command = ["git", "-C", str(root), "archive", revision, "checkfreq", "iterators"]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode != 0:
        raise OSError(made.stderr.decode(errors="replace").strip())
    with tarfile.open(fileobj=BytesIO(made.stdout)) as archive:
        archive.extractall(into, filter="data")
    return into
