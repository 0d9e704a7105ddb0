"""A rank that hangs, with the store in its process or not, keeps no other rank for good.

Rank 0 stops itself (SIGSTOP: its threads and its store with it) or sits in C code that holds the
interpreter. No test waits for longer than a rank's deadline, and the runs wait side by side.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from checkfreq import CFCheckpoint, CFManager, CFMode
from tests.acceptance.ranks import Failure, Life, Rank, Ranks
from tests.patience import slowness
from tests.ranks import tiny

pytestmark = [pytest.mark.dist, pytest.mark.crash]

ROOT = Path(__file__).resolve().parents[2]
PHASES = {
    "making": "making the CFManager",
    "step": "step() at step 2",
    "close": "a final checkpoint at step 1",
}


def stop_self() -> None:
    """As a debugger, a full swap or a dead node would."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_interpreter() -> None:
    """C code that never returns, and lets no other thread of Python run."""
    ctypes.PyDLL(None).sleep(3600)


HANG: dict[str, Callable[[], None]] = {"stopped": stop_self, "in C code": hold_interpreter}


def hangs_in(rank: Rank) -> None:
    """One checkpoint, then each phase; in its own, rank 0 hangs once the others came to it."""
    hanging = rank.settings["phase"]

    def before(phase: str) -> None:
        if phase != hanging:
            return
        rank.send("waits")
        (rank.life.folder / f"waits-{rank.rank}").touch()
        if rank.rank == 0:
            while len(list(rank.life.folder.glob("waits-*"))) < rank.world:
                pass
            HANG[rank.settings["how"]]()

    torch.manual_seed(0)  # the same on all ranks
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    before("making")
    with CFManager(
        rank.chk_dir, chk, mode=CFMode.MANUAL, chk_freq=0, config=tiny.config(rank)
    ) as manager:
        manager.restore()
        manager.weight_update()
        manager.step()
        before("close")
        if hanging == "step":
            manager.weight_update()
            manager.save()  # whatever the costs: the ranks meet at the next boundary
            before("step")
            manager.step()


def others_failures(
    folder: Path,
    program: Callable[[Rank], None],
    *,
    disturb: Callable[[Ranks], None] = lambda ranks: None,
    store: Any = "rank 0",
    **settings: Any,
) -> list[Failure]:
    """With what the ranks beside rank 0 ended, while that still hung."""
    folder.mkdir()
    short = {"rank_timeout_s": 1.5 * slowness(), "meet_every_s": 0.2}
    config = {**short, **settings.pop("config", {})}
    life = Life(program, folder, 3, settings={"config": config, **settings}, store=store)
    with Ranks(life) as ranks:
        disturb(ranks)
        others = ranks.heard[1:]
        ranks.read_until(lambda: all(one.failure for one in others))
        assert not ranks.heard[0].failure, ranks.heard
        ranks.kill([0])
        ranks.finish()
    return [one.failure for one in others if one.failure]


def tell_to_stop(ranks: Ranks) -> None:
    """SIGTERM to the ranks that wait for rank 0, or are about to."""
    ranks.read_until(lambda: all(one.all("waits") for one in ranks.heard))
    for rank in (1, 2):
        os.kill(ranks.pid(rank), signal.SIGTERM)


#: By name: the phase in which rank 0 hangs, how, and what else.
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{phase: (phase, "stopped", {}) for phase in PHASES},
    "in C code": ("step", "in C code", {}),
    "told": (
        "step",
        "stopped",
        {"disturb": tell_to_stop, "config": {"rank_timeout_s": 3600.0}},
    ),
}


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[list[Failure]]]]:
    """The runs that were asked for, begun: they wait at the same time."""
    folder, asked = tmp_path_factory.mktemp("hung"), {item.name for item in request.session.items}
    with ThreadPoolExecutor(len(RUNS)) as pool:
        yield {
            name: pool.submit(
                others_failures, folder / name, hangs_in, phase=phase, how=how, **more
            )
            for name, (phase, how, more) in RUNS.items()
            if any(f"[{name}]" in one for one in asked)
        }


@pytest.mark.parametrize(
    "name",
    [name if name == "step" else pytest.param(name, marks=pytest.mark.more) for name in RUNS],
)
def test_a_rank_0_that_hangs_is_named_with_the_phase_by_all_others(
    name: str, ended: dict[str, Future[list[Failure]]]
) -> None:
    """With its store or not; and whoever is told to stop meanwhile waits no hour for it."""
    failures = ended[name].result()
    for failure in failures:
        assert (failure.kind, failure.ranks) == ("RankError", (0,)), failure.trace
        assert failure.phase == PHASES[RUNS[name][0]]
        assert "rank 0 did not come" in failure.text
    assert len(failures) == 2


ENDING = """
import os, signal, subprocess, sys, time
import torch.distributed as dist
from checkfreq.ranks import store_thread

keeper = subprocess.Popen([sys.executable, "-c", '''
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
'''], stdout=subprocess.PIPE, text=True)
store = dist.TCPStore("127.0.0.1", int(keeper.stdout.readline()), is_master=False)

class Last:  # what is torn down last of all: by then the keeper is killed
    def __del__(self, kill=os.kill, sleep=time.sleep, pid=keeper.pid):
        kill(pid, 9)
        sleep(0.5)

sys.last = Last()
asking, cloning = store_thread.StoreThread(), store_thread.StoreThread()
clone = asking.clone(store, timeout_s=60.0)
os.kill(keeper.pid, signal.SIGSTOP)
os.waitpid(keeper.pid, os.WUNTRACED)  # until it has stopped: it may be answering still
for call in (
    lambda: asking.call(lambda is_wanted: clone.check(["a"]), patience_s=lambda: 0.0),
    lambda: cloning.clone(store, timeout_s=0.0),
):
    try:
        call()
    except store_thread.SilentStore:
        print("silent", flush=True)
"""


@pytest.mark.more
def test_a_process_that_gave_up_a_store_ends_well_even_if_that_dies_meanwhile() -> None:
    command = [sys.executable, "-W", "ignore", "-c", ENDING]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert (done.stdout, done.returncode) == ("silent\nsilent\n", 0), done.stderr
