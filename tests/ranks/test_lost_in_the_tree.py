"""Root, inner node and leaf die, hang or are told to stop, before every call to the store.

Seven processes that only meet, in a tree of three levels: 0 over 1 and 4, each over two leaves.
Whatever happens to one, all others notice within the timeout and name it. Nobody waits for longer
than a rank's deadline, and the runs wait side by side.
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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from checkfreq.errors import RankError
from checkfreq.ranks.meetings import Meetings
from checkfreq.ranks.merging import who
from checkfreq.ranks.store_thread import StoreThread
from tests.fork_server import FORK_SERVER
from tests.patience import slowness

pytestmark = [pytest.mark.dist, pytest.mark.crash, pytest.mark.more]

WORLD = 7
#: What each calls the store for in a meeting, at least: its own word; from those with children, a
#: look for their words, these, and the joined one or the decision; from all but rank 0, a look for
#: the decision, and it.
CALLS = {0: 4, 1: 6, 3: 3}
PLACES = [(rank, call) for rank, calls in CALLS.items() for call in range(calls)]


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
    world: int = WORLD
    fan_in: int = 2


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
    ranks = [_forked(run, rank) for rank in range(run.world)]
    store = _new_store(run)  # its threads must not be forked
    living = {pid for rank, pid in enumerate(ranks) if rank != run.victim}
    until_s = time.monotonic() + LIMIT_S
    while living and time.monotonic() < until_s:
        living = {pid for pid in living if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        time.sleep(0.005)
    if run.action != "hangs" and not living:
        os.waitpid(ranks[run.victim], 0)
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
    store, thread = _store(run), StoreThread()
    clone = thread.clone(store, timeout_s=60.0)
    watched = Watched(clone, run.action, run.call if rank == run.victim else -1)
    meetings = Meetings(
        watched,
        rank=rank,
        world=run.world,
        timeout_s=60.0,
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


def _store(run: Run) -> dist.TCPStore:
    """A store of this run's own: where it accepts a connection it may have to look up a name."""
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


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, Future[dict[int, Came]]]]:
    """Every run of this file, begun."""
    folder, timeout_s = tmp_path_factory.mktemp("tree"), 6.0 * slowness()
    with ThreadPoolExecutor(12) as pool:
        yield {
            (rank, action, call): pool.submit(
                outcome, Run(folder / f"{rank}-{number}-{call}", rank, action, call, timeout_s)
            )
            for number, action in enumerate(("dies", "hangs", "is told to stop"))
            for rank, call in PLACES
        }


@pytest.mark.parametrize("action", ["dies", "hangs"])
@pytest.mark.parametrize(("rank", "call"), PLACES)
def test_a_lost_rank_is_named_by_all_others_whatever_it_was_doing(
    rank: int, call: int, action: str, ended: dict[Any, Future[dict[int, Came]]]
) -> None:
    came = ended[rank, action, call].result()
    assert came.keys() == {*range(WORLD)} - {rank}
    for other in came.values():
        assert other.ranks == (rank,), other
        assert f"rank {rank} did not come" in other.error
        assert other.phase in ("step 2", "step 3")
        assert other.waited_s < 1.9 * 6.0 * slowness(), "it waited at every level anew"


@pytest.mark.parametrize(("rank", "call"), PLACES)
def test_a_stop_signal_to_any_rank_stops_all_in_the_same_meeting(
    rank: int, call: int, ended: dict[Any, Future[dict[int, Came]]]
) -> None:
    came = ended[rank, "is told to stop", call].result()
    assert came.keys() == {*range(WORLD)}
    assert {other.stopped_in for other in came.values()} in ({2}, {3}), came
