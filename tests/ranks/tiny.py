"""A training that is next to nothing, with state of every kind that ranks can have.

Replicated: model, optimizer, a dict; with the setting ``frozen`` the model has a frozen base that
checkpoints share. Sharded: the rows of a table. Own: a dict named in ``per_rank``, and the random
generators. No rank sends another anything, so what ends when one is killed was ended by the
manager.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from checkfreq import CFCheckpoint, CFManager, CFMode, KeepLast
from checkfreq.ranks import meetings
from iterators.testing import digest
from tests.acceptance.ranks import Rank, config

ROWS = 5  # which no world divides
FROZEN = (512, 512)  # just as large as is worth a file of its own


class Warnings(logging.Handler):
    """Keeps what was said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See Handler."""
        self.texts.append(record.getMessage())


class Tiny:
    """The objects of one rank."""

    def __init__(self, rank: Rank) -> None:
        self.number = rank.rank
        generator = torch.Generator().manual_seed(0)
        first = torch.nn.Linear(6, 8)
        if rank.settings.get("frozen"):
            first.base = torch.nn.Linear(*FROZEN, bias=False).requires_grad_(False)
        self.model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(8))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        self.common: dict[str, Any] = {"count": 0, "best": float("inf")}
        self.own: dict[str, Any] = {"rank": rank.rank, "drawn": ()}
        self.table = {"rows": sharded_rows(rank)}

    def tracked(self) -> dict[str, Any]:
        """Everything under its name, as CFCheckpoint takes it."""
        names = ("model", "optimizer", "common", "own", "table")
        return {name: getattr(self, name) for name in names}

    def update(self, manager: CFManager) -> None:
        """One iteration up to its boundary."""
        generator = torch.Generator().manual_seed(manager.global_step)
        x = torch.rand(4, 6, generator=generator)  # the same on all ranks
        loss = self.model(x).square().mean()
        loss.backward()
        manager.weight_update()
        self.optimizer.zero_grad()
        self.common["count"] += 1
        self.common["best"] = min(self.common["best"], loss.item())
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        self.own["drawn"] = (*self.own["drawn"], drawn)[-3:]
        with manager.updating():
            local(self.table["rows"]).add_(self.number + drawn)

    def bits(self) -> str:
        """A digest of every bit of this rank's state, the generators included."""
        states = [self.model.state_dict(), self.optimizer.state_dict(), self.common, self.own]
        generators = [random.getstate(), list(np.random.get_state()), torch.get_rng_state()]
        return digest([states, local(self.table["rows"]), generators])


def sharded_rows(rank: Rank) -> torch.Tensor:
    """A table whose rows are spread over the ranks; a plain one, where there is no group."""
    whole = torch.arange(ROWS * 3, dtype=torch.float32).reshape(ROWS, 3)
    if not dist.is_initialized():
        return whole
    mesh = init_device_mesh("cpu", (rank.world,))
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def managed(rank: Rank, **changes: Any) -> Iterator[tuple[CFManager, Tiny]]:
    """A manager and what it checkpoints; the life's settings may change its arguments."""
    rank.arm_trainer()
    tiny = Tiny(rank)
    settings: dict[str, Any] = {
        "mode": CFMode.MANUAL,
        "chk_freq": 1,
        "retention": KeepLast(3),
        "tolerate_failures": 1000,
        "config": config(rank),
    }
    settings.update(changes)
    settings.update(rank.settings.get("manager", {}))
    chk = CFCheckpoint(per_rank=("own",), **tiny.tracked())
    rank.arm_worker()
    with CFManager(rank.chk_dir, chk, **settings) as manager:
        rank.disarm()
        process = manager._persistence._client._process
        if process is not None:
            rank.send("worker", process.pid)
        yield manager, tiny


def train(rank: Rank) -> None:
    """Restore, and train to step ``steps``, saying all that happens.

    Reports ("source", where from) and ("restored", step, bits), before each boundary ("boundary",
    step, bits), after it ("durable", step) when that is news, at the end ("done", stats).
    """
    durable = None
    with managed(rank) as (manager, tiny):
        if manager.restore(rank.settings.get("restore")):
            rank.send("source", manager.stats()["restored_from"])
            rank.send("restored", manager.global_step, tiny.bits())
        while manager.global_step < rank.settings["steps"]:
            tiny.update(manager)
            rank.send("boundary", manager.global_step + 1, tiny.bits())
            manager.step()
            if rank.settings.get("waits"):
                manager.wait()
            if manager.stats()["last_durable_step"] != durable:
                durable = manager.stats()["last_durable_step"]
                rank.send("durable", durable)
    rank.send("done", manager.stats())


def train_in_a_tree(rank: Rank) -> None:
    """`train`, with meetings in which no rank joins the words of more than two others."""
    meetings.FAN_IN = 2
    train(rank)
