"""One rank of an elastic training run: restore, train, checkpoint, until done or killed.

The model is integers, so it depends on which sample was at which place with which bits, and not
on who loaded it or in what order the ranks' parts were added. What survives a life is one file,
written by rank 0 at an iteration boundary: the model and the ranks' merged position.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import multiprocessing
import os
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from iterators import CFIterator, Ledger, ResumableDataLoader
from iterators.testing.digest import digest
from tests.iterators.datasets import Augmented

if TYPE_CHECKING:
    from iterators.dali import DALILoader

GROUP_LIMIT = timedelta(seconds=120)

#: A rank that lives longer says where it is stuck, before its group gives up.
STUCK_S = 110.0

#: Ranks must not finish the run while the killer takes its time.
MOST_STEPS_AFTER_AIM = 6

#: Hashes are cut to it, so that their sum over a batch fits int64.
HASH_BITS = 48


@dataclass(frozen=True, slots=True)
class Data:
    """What is learnt; the same in every life of a run. ``images``: a folder, read with DALI."""

    n: int
    epochs: int
    seed: int
    images: str | None = None

    def loader(self, *, batch: int, workers: int = 0) -> CFIterator:
        """Rank and world are the process group's."""
        if self.images is not None:
            return CFIterator(_dali_loader(self.images, batch, self.seed))
        return CFIterator(
            ResumableDataLoader(
                Augmented(self.n),
                batch,
                shuffle=True,
                seed=self.seed,
                num_workers=workers,
                collate_fn=list,
            )
        )

    def samples(self, batch: Any) -> list[Any]:
        """The samples of a batch, one by one."""
        if self.images is None:
            return list(batch)
        (columns,) = batch
        return list(zip(columns["data"], columns["label"], strict=True))


def _dali_loader(images: str, batch: int, seed: int) -> DALILoader:
    """DALI starts threads and is imported here, where the process that uses it was forked."""
    from iterators.dali.imagenet import imagenet_train

    return imagenet_train(images, batch, image_size=8, num_threads=1, seed=seed)


@dataclass(frozen=True, slots=True)
class Life:
    """One life of the run. ``aim``: after that many boundaries the killer may strike."""

    data: Data
    folder: str
    number: int
    world: int
    batch: int
    workers: int
    checkpoint_every: int
    aim: int | None = None

    @property
    def checkpoint(self) -> Path:
        """The one file that outlives a life."""
        return Path(self.folder, "checkpoint.json")


class Model:
    """How often each sample was learnt in each epoch, and hashes of all that was."""

    def __init__(self, data: Data) -> None:
        self.counts = np.zeros((data.epochs, data.n), dtype=np.int64)
        self.sum = self.xor = 0
        self.ledgers: list[Ledger] = []

    def state(self) -> dict[str, Any]:
        """A JSON-able form; learning in another order gives the same."""
        return {
            "counts": self.counts.tolist(),
            "sum": self.sum,
            "xor": self.xor,
            "ledgers": [one.to_dict() for one in self.ledgers],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Inverse of ``state``."""
        self.counts = np.array(state["counts"], dtype=np.int64)
        self.sum, self.xor = state["sum"], state["xor"]
        self.ledgers = [Ledger.from_dict(one) for one in state["ledgers"]]

    def learn(self, epoch: int, parts: torch.Tensor, xor: int) -> None:
        """Take in one global batch: counts by sample and the sum of hashes, and their xor."""
        *counts, total = parts.tolist()
        self.counts[epoch] += np.array(counts)
        self.sum = (self.sum + total) % (1 << 64)
        self.xor ^= xor


class Group:
    """The collectives the program needs, over a store; a world of one needs none.

    Not over the process group: its threads let go of tensors, which needs the interpreter, while
    the next epoch's workers are being forked. Before Python 3.11.10 such a worker can hang
    (python/cpython#112275).
    """

    def __init__(self, rank: int = 0, world: int = 1, store: dist.Store | None = None) -> None:
        self.rank, self.world = rank, world
        self._store = store
        self._num_gathered = 0

    def reduced(self, values: torch.Tensor, *, xor: bool = False) -> torch.Tensor:
        """``values`` summed (or xored) over the ranks."""
        parts = torch.tensor(self.gathered(values.tolist()))
        return functools.reduce(torch.bitwise_xor, parts) if xor else parts.sum(0)

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (JSON-able), in the order of the ranks, on every rank."""
        if self._store is None:
            return [value]
        self._num_gathered += 1
        self._store.set(f"{self._num_gathered}/{self.rank}", json.dumps(value))
        keys = (f"{self._num_gathered}/{rank}" for rank in range(self.world))
        return [json.loads(self._store.get(key)) for key in keys]


def train(
    loader: CFIterator,
    model: Model,
    data: Data,
    group: Group,
    at_boundary: Callable[[], None],
) -> None:
    """Learn every epoch; ``at_boundary`` is called at each, the model and position agreeing."""
    for epoch in loader.epochs(data.epochs):
        note_ledger(loader, model, group)
        for batch in loader:
            at_boundary()
            parts, xor = hashed(loader, data.samples(batch), data.n, group)
            model.learn(epoch, group.reduced(parts), int(group.reduced(xor, xor=True)))
    note_ledger(loader, model, group)
    at_boundary()


def note_ledger(loader: CFIterator, model: Model, group: Group) -> None:
    """What all ranks together served in the epoch that ended last, once."""
    report = loader.last_report
    if report is not None and len(model.ledgers) == report.epoch:
        ledgers = [Ledger.from_dict(one) for one in group.gathered(report.ledger.to_dict())]
        model.ledgers.append(sum(ledgers, Ledger()))


def hashed(
    loader: CFIterator, samples: list[Any], n: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a global batch: counts and the sum of hashes ``[n + 1]``, their xor.

    The ``j``-th sample of rank ``r`` is at place ``r + W * j`` of the global batch.
    """
    ids, weights = loader.last_ids, loader.last_weights
    assert ids is not None
    assert weights is not None
    place = loader.state_dict()["position"] + group.rank
    parts, xor = torch.zeros(n + 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for index, (sample, weight) in enumerate(zip(samples, weights, strict=True)):
        if weight:
            learnt = digest((loader.epoch, place + group.world * index, digest(sample)))
            bits = int(learnt, 16) % (1 << HASH_BITS)
            parts[int(ids[index])] += 1
            parts[n] += bits
            xor ^= bits
    return parts, xor


def undisturbed(data: Data) -> Model:
    """What one process learns that nobody kills."""
    model = Model(data)
    train(data.loader(batch=1), model, data, Group(), lambda: None)
    return model


def run_rank(life: Life, rank: int, reports: Connection, aimed: Connection) -> None:
    """Entry point of a rank's process, which leads a process group with its loader workers."""
    os.setpgrp()
    faulthandler.dump_traceback_later(STUCK_S, repeat=True)
    assert "nvidia.dali" not in sys.modules, "the server that forks must not have started DALI"
    multiprocessing.set_start_method("fork", force=True)  # for loaders, as is usual
    warnings.simplefilter("error")
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(life.number * 64 + rank)  # differs from life to life: nothing may depend on it
    reports.send("started")
    store = join_group(life, rank) if life.world > 1 else None
    model, group = Model(life.data), Group(rank, life.world, store)
    loader = life.data.loader(batch=life.batch, workers=life.workers)
    restore(life, model, loader)
    reports.send("restored")
    boundaries = _Boundaries(life, model, loader, group, (reports, aimed))
    train(loader, model, life.data, group, boundaries.passed)
    loader.finish()
    if life.world > 1:
        dist.barrier()  # rank 0 serves the store until all are done with it
        dist.destroy_process_group()


def join_group(life: Life, rank: int) -> dist.Store:
    """Form the process group of this life, over loopback; returns a store that it leaves alone.

    Rank 0 tells the store's port through a file of this life.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    told = dist.FileStore(str(Path(life.folder, f"store-{life.number}")), life.world)
    told.set_timeout(GROUP_LIMIT)
    serve = functools.partial(
        dist.TCPStore, "127.0.0.1", timeout=GROUP_LIMIT, wait_for_workers=False
    )
    if rank == 0:
        store = serve(port=0, is_master=True)
        told.set("port", str(store.port))
    else:
        store = serve(port=int(told.get("port")), is_master=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=life.world,
        timeout=GROUP_LIMIT,
    )
    return dist.PrefixStore("program", store)


def restore(life: Life, model: Model, loader: CFIterator) -> None:
    """Continue from the last checkpoint, if there is one."""
    if life.checkpoint.exists():
        saved = json.loads(life.checkpoint.read_text())
        model.load(saved["model"])
        loader.load_state_dict(saved["position"])


class _Boundaries:
    """What one rank does at every boundary."""

    def __init__(
        self,
        life: Life,
        model: Model,
        loader: CFIterator,
        group: Group,
        killer: tuple[Connection, Connection],
    ) -> None:
        self._life, self._model, self._loader, self._group = life, model, loader, group
        self._reports, self._aimed = killer
        self._num_passed = 0

    def passed(self) -> None:
        """Checkpoint if it is time; report; wait for the killer if it is due."""
        if self._loader.step % self._life.checkpoint_every == 0 or self._is_over():
            self._checkpoint()
        self._reports.send("boundary")
        self._num_passed += 1
        aim = self._life.aim
        if aim is not None and self._num_passed == aim + MOST_STEPS_AFTER_AIM:
            self._aimed.recv()  # never comes: the kill is on its way

    def _is_over(self) -> bool:
        return self._loader.epoch == self._life.data.epochs

    def _checkpoint(self) -> None:
        states = self._group.gathered(self._loader.state_dict())
        if self._group.rank == 0:
            position = self._loader.merged_state(states)
            write_durably(
                self._life.checkpoint, {"model": self._model.state(), "position": position}
            )


def write_durably(path: Path, content: dict[str, Any]) -> None:
    """All of ``content`` under ``path``, or what was there before."""
    temporary = path.with_suffix(".new")
    with temporary.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
