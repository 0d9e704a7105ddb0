"""What the child processes of these tests run: a training with a mirror."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast
from checkfreq.mirror.reader import MirrorReader
from checkfreq.mirror.settings import Mirror
from checkfreq.store.store import CheckpointStore
from tests.acceptance.programs import Training
from tests.fork_server import FORK_SERVER

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Job:
    """One training process. ``worker_faults`` are scripted into its first worker alone."""

    chk_dir: str
    mirror: Mirror
    num_steps: int = 3
    keep_last: int = 3
    worker_faults: str = ""


def train(log: Connection, job: Job) -> None:
    """Restore and train up to ``num_steps``, each step committed, and uploaded before the next.

    Sends ("restored", step, digest), ("boundary", step, digest), ("done", stats).
    """
    torch.set_num_threads(1)
    training = Training()
    os.environ["CHECKFREQ_FAULT"] = job.worker_faults
    with CFManager(
        job.chk_dir,
        CFCheckpoint(**training.tracked()),
        mode=CFMode.MANUAL,
        chk_freq=1,
        retention=KeepLast(job.keep_last),
        config=CFConfig(mirror=job.mirror, nice=0, takeover_s=DEADLINE_S, keep_in_memory_s=0.0),
    ) as manager:
        os.environ["CHECKFREQ_FAULT"] = ""
        if manager.restore():
            log.send(("restored", manager.global_step, training.digest()))
        while manager.global_step < job.num_steps:
            training.update(manager)
            manager.step()
            log.send(("boundary", manager.global_step, training.digest()))
            wait_uploaded(manager, manager.global_step)
    log.send(("done", manager.stats()))


def wait_until_state(manager: CFManager, state: str) -> None:
    """Return once the mirror says that it is in this state."""
    assert manager._persistence.wait_until(
        lambda: manager.stats()["mirror"]["state"] == state,
        timeout_s=DEADLINE_S,
        look_every_s=0.02,
    ), manager.stats()["mirror"]


def wait_uploaded(manager: CFManager, step: int) -> None:
    """Return once the mirror has ``step``, or a later one."""

    def is_there() -> bool:
        newest = manager.stats()["mirror"]["uploaded_step"]
        return newest is not None and newest >= step

    assert manager._persistence.wait_until(is_there, timeout_s=DEADLINE_S, look_every_s=0.02), (
        f"step {step} is not in the mirror: {manager.stats()['mirror']}"
    )


class Child:
    """A process that trains, and what it sends."""

    def __init__(self, job: Job) -> None:
        self._pipe, theirs = FORK_SERVER.Pipe()
        self._process = FORK_SERVER.Process(target=train, args=(theirs, job))
        self._process.start()
        theirs.close()

    def read_all(self) -> tuple[list[tuple[Any, ...]], int]:
        """Its messages, and its exit code (-9 when killed)."""
        found = []
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                assert self._pipe.poll(2 * DEADLINE_S), "the process fell silent"
                found.append(self._pipe.recv())
        self._process.join(DEADLINE_S)
        code = self._process.exitcode
        assert code is not None, "the process did not end"
        return found, code


def expect_whole(mirror: Mirror, chk_dir: Path, *, newest: int) -> None:
    """The mirror's newest is ``newest``, all it names is there, and is what the directory holds."""
    source, store = MirrorReader(mirror), CheckpointStore(chk_dir)
    steps = source.steps()
    assert steps[-1] == newest
    for step in steps:
        manifest = source.verify(step)
        if step in store.steps():
            assert manifest == store.manifest(step)
