"""Ranks as processes of this machine: started, killed and read by a test. Nothing waits for good.

A rank is forked from a server that has torch imported already, and joins a process group of its
life within some hundredths of a second. A rank that hangs prints its stack and ends by itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from checkfreq import CFConfig, Directory, faults
from tests.fork_server import FORK_SERVER

#: For the whole of a life; far more than any takes.
LIMIT_S = 240.0

#: Then a rank prints its stack and ends: before ``LIMIT_S``, so that the test can say more.
STUCK_S = 200.0

#: Starting a process looks after all others; one whose end two threads note at once has none.
_LOOKING = threading.Lock()

#: Where the ranks' store is: in a file, in the parent as torchrun's agent has it, in rank 0.
Where = Literal["file", "agent", "rank 0"]


@dataclass(frozen=True)
class Life:
    """One life of a run: ``program`` on ``world`` ranks.

    ``settings`` are the program's; ``trainer_faults`` and ``worker_faults`` are scripts by rank,
    the latter for a rank's first worker only.
    """

    program: Callable[[Rank], None]
    folder: Path
    world: int = 2
    number: int = 0
    #: Of the ranks' generators; differs from life to life once there is something to restore.
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    trainer_faults: dict[int, str] = field(default_factory=dict)
    worker_faults: dict[int, str] = field(default_factory=dict)
    fault_log: Path | None = None
    store: Where = "file"


@dataclass(frozen=True)
class Failure:
    """The exception with which a rank's program ended."""

    kind: str
    text: str
    ranks: tuple[int, ...] | None = None
    phase: str | None = None
    trace: str = field(default="", repr=False, compare=False)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """As much of it as can be sent."""
        ranks, phase = getattr(error, "ranks", None), getattr(error, "phase", None)
        trace = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error), ranks, phase, trace)


class Rank:
    """What a program knows of itself, in the rank's own process."""

    def __init__(self, life: Life, rank: int, reports: Connection) -> None:
        self.life, self.rank, self.world = life, rank, life.world
        self.settings = life.settings
        self._reports = reports
        self._worker_script = life.worker_faults.get(rank, "")

    def send(self, kind: str, *values: Any) -> None:
        """Report; what was sent before a SIGKILL arrives."""
        self._reports.send((kind, *values))

    @property
    def chk_dir(self) -> Path:
        """The directory of all ranks, or this one's own."""
        name = f"chk-{self.rank}" if self.settings.get("local") else "chk"
        return self.life.folder / name

    def arm_worker(self) -> None:
        """The worker started next gets its fault script."""
        self._install(self._worker_script, "worker")

    def disarm(self) -> None:
        """Those after it get none."""
        os.environ.pop("CHECKFREQ_FAULT", None)
        os.environ.pop("CHECKFREQ_FAULT_LOG", None)

    def arm_trainer(self) -> None:
        """This process gets its fault script."""
        self._install(self.life.trainer_faults.get(self.rank, ""), "trainer")
        faults.reload()
        self.disarm()

    def _install(self, script: str, process: str) -> None:
        os.environ["CHECKFREQ_FAULT"] = script
        if self.life.fault_log is not None:
            log = f"{self.life.fault_log}-{process}-{self.rank}"
            os.environ["CHECKFREQ_FAULT_LOG"] = log


def config(rank: Rank) -> CFConfig:
    """Short deadlines; the life's settings may say more."""
    settings: dict[str, Any] = {
        "verify_settled": True,
        "nice": 0,
        "keep_in_memory_s": 0.0,  # killed ranks are restored from the disk
        "takeover_s": 120.0,
        "close_timeout_s": 120.0,
        "persist_timeout_s": 120.0,
        "rank_timeout_s": 60.0,
        "directory": Directory.NODE_LOCAL if rank.settings.get("local") else Directory.SHARED,
    }
    return CFConfig(**{**settings, **rank.settings.get("config", {})})


class Heard:
    """What a rank reported and how it ended."""

    def __init__(self) -> None:
        self.reports: list[tuple[Any, ...]] = []
        self.exit_code: int | None = None
        self.failure: Failure | None = None

    def note(self, report: tuple[Any, ...]) -> None:
        """Take in one report."""
        if report[0] == "failed":
            self.failure = report[1]
        else:
            self.reports.append(report)

    def all(self, kind: str) -> list[Any]:
        """The values of all reports of a kind, in order; a tuple where there are several."""
        found = [report[1:] for report in self.reports if report[0] == kind]
        return [values[0] if len(values) == 1 else values for values in found]

    def last(self, kind: str) -> Any:
        """The values of the last report of a kind."""
        return self.all(kind)[-1]

    def __repr__(self) -> str:
        trace = self.failure.trace if self.failure else ""
        return f"<exit code {self.exit_code}, reports {self.reports[-5:]}\n{trace}>"


class Ranks:
    """The processes of one life. All trainers are dead when the ``with`` block is left."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._deadline_s = time.monotonic() + LIMIT_S
        self._processes: list[Any] = []
        self._pipes: dict[Connection, int] = {}
        self._agent: dist.TCPStore | None = None
        self._meeting_place = life.folder / f"store-{uuid.uuid4().hex}"
        self.heard = [Heard() for _ in range(life.world)]

    def __enter__(self) -> Ranks:
        if self._life.store == "agent":
            self._agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            _tell_port(self._agent, self._meeting_place)
        try:
            for rank in range(self._life.world):
                self._start(rank)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for process in self._processes:
            _ended(process, LIMIT_S)
        for pipe in self._pipes:
            pipe.close()

    def _start(self, rank: int) -> None:
        pipe, theirs = FORK_SERVER.Pipe(duplex=False)
        process = FORK_SERVER.Process(
            target=run_rank, args=(self._life, rank, theirs, self._meeting_place)
        )
        with _LOOKING:
            process.start()
        theirs.close()
        self._pipes[pipe] = rank
        self._processes.append(process)

    def pid(self, rank: int) -> int:
        """Process id of a rank's trainer."""
        return int(self._processes[rank].pid)

    def kill(self, ranks: Iterable[int] | None = None) -> None:
        """SIGKILL the trainers of these ranks (default: of all) and their loader workers."""
        for rank in range(len(self._processes)) if ranks is None else ranks:
            process = self._processes[rank]
            if _ended(process) is None:
                with contextlib.suppress(ProcessLookupError):  # it does not lead a group yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()

    def kill_workers(self) -> None:
        """SIGKILL every persist worker whose process id was reported."""
        for pid in [pid for heard in self.heard for pid in heard.all("worker")]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def read_until(self, happened: Callable[[], bool]) -> bool:
        """Take in reports until something has happened; False if all came to their end before."""
        while not happened():
            if not self._read():
                return happened()
        return True

    def watch(self, path: Path) -> None:
        """Take in reports until a file is there."""
        while not path.exists():
            assert self._read(most_s=0.005), f"{path} never came: {self.heard}"

    def finish(self) -> list[Heard]:
        """Wait for the end of all ranks."""
        while self._read():
            pass
        for process, heard in zip(self._processes, self.heard, strict=True):
            heard.exit_code = _ended(process, max(0.0, self._deadline_s - time.monotonic()))
            assert heard.exit_code is not None, f"a rank of {self._life} did not end: {heard}"
        return self.heard

    def end_with(self, victim: int) -> list[Heard]:
        """Wait for one rank's end, then do to the others what a launcher does: kill them."""
        self.read_until(lambda: _ended(self._processes[victim]) is not None)
        self.kill()
        return self.finish()

    def _read(self, most_s: float | None = None) -> bool:
        """Take in what is there, waiting for it (``most_s``); False if no rank is left."""
        running = [process.sentinel for process in self._processes if _ended(process) is None]
        if not self._pipes:
            return False
        left_s = self._deadline_s - time.monotonic()
        limit_s = max(0.0, left_s) if most_s is None else most_s
        ready = wait([*self._pipes, *running], timeout=limit_s)
        assert ready or left_s > limit_s, f"{self._life} took over {LIMIT_S} s: {self.heard}"
        for pipe in [pipe for pipe in self._pipes if pipe in ready]:
            self._take(pipe)
        for pipe, rank in list(self._pipes.items()):  # its loader workers may hold it open
            if _ended(self._processes[rank]) is not None:
                while pipe in self._pipes and pipe.poll():
                    self._take(pipe)
                self._forget(pipe)
        return True

    def _take(self, pipe: Connection) -> None:
        try:
            self.heard[self._pipes[pipe]].note(pipe.recv())
        except (EOFError, OSError):
            self._forget(pipe)

    def _forget(self, pipe: Connection) -> None:
        if self._pipes.pop(pipe, None) is not None:
            pipe.close()


def _ended(process: Any, limit_s: float = 0.0) -> int | None:
    """The exit code, once there is one; waits for it at most that long."""
    wait([process.sentinel], timeout=limit_s)
    with _LOOKING:
        code: int | None = process.exitcode
    return code


def run(life: Life) -> list[Heard]:
    """Live it to its end; what each rank said."""
    with Ranks(life) as ranks:
        return ranks.finish()


def run_well(life: Life) -> list[Heard]:
    """``run``, where no rank may fail."""
    heard = run(life)
    assert [one.exit_code for one in heard] == [0] * life.world, heard
    return heard


# ---- in the rank's process


def run_rank(life: Life, rank: int, reports: Connection, meeting_place: Path) -> None:
    """Entry point of a rank's process, which leads a process group with its loader workers."""
    os.setpgrp()
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    multiprocessing.set_start_method("fork", force=True)  # for loaders, as is usual
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
    torch.set_num_threads(1)
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(life.seed * 64 + rank)
    here = Rank(life, rank, reports)
    try:
        _join_group(life, rank, meeting_place)
        life.program(here)
    except BaseException as error:
        here.send("failed", Failure.of(error))
        os._exit(1)  # without waiting for other ranks
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_group(life: Life, rank: int, meeting_place: Path) -> None:
    """Form the process group of this life, over loopback."""
    if life.world == 1:
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = _store(life, rank, meeting_place)
    limit = timedelta(seconds=LIMIT_S / 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=life.world, timeout=limit)


def _store(life: Life, rank: int, meeting_place: Path) -> dist.Store:
    if life.store == "file":
        return dist.FileStore(str(meeting_place), life.world)
    if life.store == "rank 0" and rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _tell_port(store, meeting_place)
        return store
    deadline_s = time.monotonic() + LIMIT_S
    while not meeting_place.exists():
        assert time.monotonic() < deadline_s, "rank 0 did not come"
        time.sleep(0.002)
    return dist.TCPStore("127.0.0.1", int(meeting_place.read_text()), is_master=False)


def _tell_port(store: dist.TCPStore, meeting_place: Path) -> None:
    draft = meeting_place.with_suffix(".new")
    draft.write_text(str(store.port))
    draft.rename(meeting_place)
