"""What the child processes of the crash tests run: a small training and its log.

The model is tiny but has every kind of state: BatchNorm statistics, dropout (so the random
generators matter), AdamW moments, a scheduler and a plain dict. Training draws its data from
the tracked generators, so two runs from the same state take the same path bit for bit. Every
message is one small write to a pipe: what was sent before a SIGKILL arrives.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import xxhash

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast, faults


@dataclass(frozen=True)
class Run:
    """One training process: what it does, and the faults scripted into it and its worker."""

    chk_dir: str
    num_steps: int
    keep_last: int = 3
    restore_step: int | None = None
    #: Goes into the state: two runs that differ in it never have the same digest.
    timeline: int | None = None
    checkpoints: bool = True
    agent_copies_within_s: float | None = None
    #: 0: a killed run is restored from the disk, as after the end of a machine.
    keep_in_memory_s: float = 0.0
    takeover_s: float = 30.0
    #: The model has a frozen part that is large enough for a file of its own.
    frozen: bool = False
    #: Each step waits until its checkpoint is durable: none is skipped, however slow the disk.
    waits: bool = False
    mirror: str | None = None
    trainer_faults: str = ""
    worker_faults: str = ""
    fault_log: str = ""


class Training:
    """The objects of one run."""

    def __init__(self, *, frozen: bool = False) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(32, 4),
        )
        trained = [*self.model.parameters()]
        if frozen:
            base = torch.nn.Parameter(torch.randn(600, 600), requires_grad=False)
            self.model.register_parameter("base", base)
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.extra: dict[str, Any] = {"best": float("inf"), "seen": (), "timeline": 1}

    def tracked(self) -> dict[str, Any]:
        """All objects by name, for CFCheckpoint."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "extra": self.extra,
        }

    def update(self, manager: CFManager) -> None:
        """One forward, backward and weight update."""
        noise = random.random() + float(np.random.rand())
        loss = self.model(torch.randn(8, 16) + noise).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        manager.weight_update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.extra["best"] = min(self.extra["best"], loss.item())
        self.extra["seen"] = (*self.extra["seen"], noise)[-3:]

    def digest(self) -> str:
        """Digest of the whole state, random generators included."""
        state = xxhash.xxh3_64()
        for name, value in self.tracked().items():
            _feed(state, value if isinstance(value, dict) else value.state_dict(), name)
        _feed(state, [torch.get_rng_state(), random.getstate(), np.random.get_state()], "rng")
        return str(state.hexdigest())


def _feed(state: xxhash.xxh3_64, value: Any, path: str) -> None:
    if isinstance(value, torch.Tensor):
        state.update(f"{path}:{value.dtype}:{tuple(value.shape)}".encode())
        state.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        state.update(path.encode() + value.tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            _feed(state, value[key], f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _feed(state, item, f"{path}[{index}]")
    else:
        state.update(f"{path}={value!r}".encode())


@contextmanager
def _manager(run: Run, training: Training) -> Iterator[CFManager]:
    """A manager whose first worker gets ``worker_faults``, and no other."""
    _install(run.trainer_faults, run.fault_log)
    faults.reload()
    _install(run.worker_faults, run.fault_log)
    with CFManager(
        run.chk_dir,
        CFCheckpoint(**training.tracked()),
        mode=CFMode.MANUAL,
        chk_freq=1 if run.checkpoints else 0,
        retention=KeepLast(run.keep_last),
        tolerate_failures=1000,
        config=CFConfig(
            verify_settled=not run.frozen,  # with it nothing is believed to be unchanged
            full_copy_every=3,
            takeover_s=run.takeover_s,
            keep_in_memory_s=run.keep_in_memory_s,
            nice=0,
            agent_copies_within_s=run.agent_copies_within_s,
            mirror=run.mirror,
        ),
    ) as manager:
        _install("", "")
        yield manager


def _install(script: str, log: str) -> None:
    os.environ["CHECKFREQ_FAULT"] = script
    os.environ.pop("CHECKFREQ_FAULT_LOG", None)
    if log:
        os.environ["CHECKFREQ_FAULT_LOG"] = log


def train(log: Connection, run: Run) -> None:
    """Restore and train up to ``num_steps``.

    Sends ("source", where from) and ("restored", step, digest), for each boundary ("boundary",
    step, digest) before it is passed, ("durable", step) for what the manager knows to be committed,
    ("done", stats).
    """
    torch.set_num_threads(1)
    training = Training(frozen=run.frozen)
    durable = None
    with _manager(run, training) as manager:
        if manager.restore(run.restore_step):
            log.send(("source", manager.stats()["restored_from"]))
            log.send(("restored", manager.global_step, training.digest()))
        if run.timeline is not None:
            training.extra["timeline"] = run.timeline
        while manager.global_step < run.num_steps:
            training.update(manager)
            log.send(("boundary", manager.global_step + 1, training.digest()))
            manager.step()
            if run.waits:
                manager.wait()
            if manager.stats()["num_committed"] and manager.stats()["last_durable_step"] != durable:
                durable = manager.stats()["last_durable_step"]
                log.send(("durable", durable))
    log.send(("done", manager.stats()))


# Making an optimizer imports hundreds of modules: once, in the process that is forked.
Training()
