"""Ranks that only meet: processes with a connection to a store, and no training.

They are forked from one process, so that seven ranks cost about as much as one. Each writes what
came of it into a file; who was to die or hang leaves none.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from checkfreq.errors import RankError
from checkfreq.ranks.meetings import Meetings
from checkfreq.ranks.merging import who
from checkfreq.ranks.store_thread import StoreThread
from tests.fork_server import FORK_SERVER

#: For a whole run; far more than any takes.
LIMIT_S = 200.0

#: Starting a process looks after all others; one whose end two threads note at once has none.
_LOOKING = threading.Lock()

#: What the victim does to itself just before a call to the store.
ACTIONS: Mapping[str, Callable[[], None]] = {
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    # To this thread: told to the process, it might go on until another thread has noticed.
    "hangs": lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP),
    "is told to stop": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "is interrupted": lambda: os.kill(os.getpid(), signal.SIGINT),
    "tells all to stop": lambda: os.killpg(0, signal.SIGTERM),
}


@dataclass(frozen=True)
class Run:
    """``world`` ranks meet until one is told to stop, or has left.

    In its second meeting ``victim`` does ``action`` just before its call number ``call``.
    """

    folder: Path
    victim: int
    action: str
    call: int
    timeout_s: float
    keeps_store: bool = False  # rank 0, instead of a process beside the ranks
    world: int = 7
    fan_in: int = 2
    hurried_timeout_s: float = 15.0
    also: Mapping[int, tuple[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Came:
    """What came of a rank: the meeting in which all stopped, or its error, ``waited_s`` after it
    came to the meeting."""

    stopped_in: int | None = None
    error: str = ""
    ranks: tuple[int, ...] = ()
    phase: str = ""
    waited_s: float = 0.0


def outcome(run: Run) -> dict[int, Came]:
    """What came of each rank that lived on."""
    run.folder.mkdir()
    process = FORK_SERVER.Process(target=_live, args=(run,))
    with _LOOKING:
        process.start()
    wait([process.sentinel], timeout=LIMIT_S + 20.0)
    with _LOOKING:
        assert process.exitcode == 0, f"{run}: {process.exitcode}"
    found = {}
    for path in run.folder.glob("came-*"):
        came = json.loads(path.read_text())
        found[int(path.name.partition("-")[2])] = Came(**{**came, "ranks": tuple(came["ranks"])})
    return found


def _live(run: Run) -> None:
    """Fork the ranks, wait for those that can end, and kill the others."""
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank may tell all
    ranks = [_forked(run, rank) for rank in range(run.world)]
    store = None if run.keeps_store else _new_store(run)  # its threads must not be forked
    doomed = {run.victim, *run.also}
    living = {pid for rank, pid in enumerate(ranks) if rank not in doomed}
    until_s = time.monotonic() + LIMIT_S
    while living and time.monotonic() < until_s:
        living = {pid for pid in living if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        time.sleep(0.005)
    if "hangs" not in (run.action, *(action for action, _ in run.also.values())) and not living:
        for rank in doomed:
            os.waitpid(ranks[rank], 0)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    del store
    sys.exit(bool(living))


def _forked(run: Run, rank: int) -> int:
    if (pid := os.fork()) == 0:
        faulthandler.dump_traceback_later(LIMIT_S - 10.0, exit=True)
        try:
            came = _meet(run, rank)
            draft = run.folder / f"draft-{rank}"
            draft.write_text(json.dumps(came))
            draft.rename(run.folder / f"came-{rank}")
        finally:
            sys.stderr.flush()
            os._exit(0)
    return pid


def _meet(run: Run, rank: int) -> dict[str, Any]:
    """Meet until all stop."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store, thread = _store(run, rank), StoreThread()
    clone = thread.clone(store, timeout_s=60.0)
    action, call = run.also.get(rank, (run.action, run.call))
    watched = Watched(clone, action, call if rank in (run.victim, *run.also) else -1)
    meetings = Meetings(
        watched,
        rank=rank,
        world=run.world,
        timeout_s=60.0,
        hurried_timeout_s=run.hurried_timeout_s,
        thread=thread,
        prefix=run.folder.name,
        fan_in=run.fan_in,
    )
    meetings.is_hurried = lambda: bool(told)
    number, began_s = 0, 0.0
    try:
        while True:
            number, began_s = number + 1, time.monotonic()
            watched.is_armed = number == 2
            stops = meetings.meet(f"step {number}", bool(told), merge=who(bool))
            meetings.timeout_s = run.timeout_s  # not while ranks are being started
            if stops:
                meetings.close()
                return {"stopped_in": number, "ranks": ()}
    except RankError as error:
        waited_s = time.monotonic() - began_s
        text = {"error": str(error), "ranks": error.ranks, "phase": error.phase}
        return {**text, "waited_s": waited_s}
    except KeyboardInterrupt:
        meetings.leave("KeyboardInterrupt")
        return {"error": "interrupted", "ranks": ()}


class Watched:
    """A store in front of which something happens once, at its user's n-th call."""

    def __init__(self, store: Any, action: str, call: int) -> None:
        self._store = store
        self._action = ACTIONS[action]
        self._left = call
        self.is_armed = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name == "has_extended_api":
            return method

        def call(*args: Any) -> Any:
            if self.is_armed:
                self._left -= 1
                if self._left == -1:
                    self._action()
            return method(*args)

        return call


def _store(run: Run, rank: int) -> dist.TCPStore:
    """A store of this run's own: where it accepts a connection it may have to look up a name."""
    if run.keeps_store and rank == 0:
        return _new_store(run)
    place, until_s = run.folder / "port", time.monotonic() + LIMIT_S
    while not place.exists():
        assert time.monotonic() < until_s, "there is no store"
        time.sleep(0.002)
    return dist.TCPStore("localhost", int(place.read_text()), is_master=False)


def _new_store(run: Run) -> dist.TCPStore:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    draft = run.folder / "port.new"
    draft.write_text(str(store.port))
    draft.rename(run.folder / "port")
    return store
