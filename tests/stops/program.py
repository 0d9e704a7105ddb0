"""A small training as users write it, on one rank or two: what the tests of stopping stop.

It writes down each batch, each loss, each end of an epoch and its bits at the end, so that the
lives of a run that was stopped can be held against one that never was. At the places that its life
names it waits, so that a signal can be aimed at them.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import random
import sys
import time
import warnings
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast, faults
from iterators import CFIterator, ResumableDataLoader, isolated_rng
from iterators.testing import digest

EPOCHS = 3
BATCHES = 13  # of each rank in an epoch
BATCH_SIZE = 4

#: The places of the loop that a signal can be aimed at, in order.
PLACES = ("fetch", "forward", "backward", "update", "updated", "validation", "tail", "end")


_HELD_AT_MOST_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One start of the script, on one of ``world`` ranks, as JSON between the processes.

    ``holds`` are places, the pass at which to wait there, and the file to wait for;
    ``trainer_fault`` and ``worker_fault`` are scripts (``checkfreq.faults``). ``config`` has
    more arguments of CFConfig, ``number`` counts the lives of a run.
    """

    folder: str
    chk: str = ""  # the checkpoint directory; default: in the folder
    number: int = 0
    rank: int = 0
    world: int = 1
    workers: int = 0
    chk_freq: int | None = 2  # None: chosen by measured costs
    on_stop: Literal["raise", "return"] = "raise"
    holds: dict[str, list[Any]] = field(default_factory=dict)
    trainer_fault: str = ""
    worker_fault: str = ""
    ballast_bytes: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def chk_dir(self) -> Path:
        """The checkpoint directory."""
        return Path(self.chk or f"{self.folder}/chk")

    @property
    def events_path(self) -> Path:
        """Where this life writes down what happens."""
        return Path(self.folder) / f"events-{self.number}-{self.rank}"

    @property
    def log_path(self) -> Path:
        """Its standard output and error."""
        return Path(self.folder) / f"log-{self.number}-{self.rank}"


class Pictures(Dataset[tuple[Tensor, int]]):
    """``[8]`` features of four classes, augmented with all three global generators."""

    def __init__(self, num_samples: int, stage: Stage | None = None) -> None:
        self._features = torch.rand(num_samples, 8, generator=torch.Generator().manual_seed(3))
        self._stage = stage

    def __len__(self) -> int:
        return len(self._features)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._stage is not None:
            self._stage.reach("fetch")
        scale = random.random() + float(np.random.uniform(0.8, 1.2))
        return self._features[index] * scale + 0.1 * torch.randn(8), index % 4


class Stage:
    """What happens in one life: written down, and held where the life says."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._passes = dict.fromkeys(PLACES, 0)
        self._events = os.open(life.events_path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)

    def say(self, kind: str, *values: object) -> None:
        """Write down an event; it is in the file when this returns."""
        os.write(self._events, (json.dumps([kind, *values]) + "\n").encode())

    def reach(self, place: str) -> None:
        """Wait here, if this is where the life says so."""
        self._passes[place] += 1
        hit, file, *most_s = self._life.holds.get(place, (0, ""))
        if hit != self._passes[place]:
            return
        path = Path(file)
        Path(f"{path}.reached").touch()
        end_s = time.monotonic() + (most_s[0] if most_s else _HELD_AT_MOST_S)
        while not path.exists() and time.monotonic() < end_s:
            time.sleep(0.001)


class Training:
    """The objects of one rank."""

    def __init__(self, life: Life) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(11)
            model: nn.Module = nn.Sequential(
                nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
            )
        self.model = DistributedDataParallel(model) if life.world > 1 else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7)
        self.progress: dict[str, Any] = {"losses": []}
        if life.ballast_bytes:
            self.progress["ballast"] = torch.zeros(life.ballast_bytes // 4)
        self.held_out = torch.rand(8, 8, generator=torch.Generator().manual_seed(4))

    def tracked(self) -> dict[str, Any]:
        """Everything under its name."""
        names = ("model", "optimizer", "scheduler", "progress")
        return {name: getattr(self, name) for name in names}

    def learn(self, stage: Stage, manager: CFManager, batch: tuple[Tensor, Tensor]) -> str:
        """Use one batch; returns the loss's bits."""
        features, labels = batch
        stage.reach("forward")
        loss = F.cross_entropy(self.model(features), labels)
        stage.reach("backward")
        loss.backward()
        stage.reach("update")
        manager.weight_update()
        self.optimizer.zero_grad()
        stage.reach("updated")
        return loss.item().hex()

    def validate(self) -> str:
        """Draws random numbers, as validations do."""
        self.model.eval()
        with isolated_rng(), torch.no_grad():
            value = self.model(self.held_out + torch.rand(8, 8)).square().mean()
        self.model.train()
        self.progress["losses"].append(value.item())
        return value.item().hex()

    def bits(self) -> str:
        """A digest of every bit that this rank's training can depend on."""
        if dist.is_initialized():  # as the next forward would
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
        states = [v if isinstance(v, dict) else v.state_dict() for v in self.tracked().values()]
        generators = [random.getstate(), list(np.random.get_state()), torch.get_rng_state()]
        return digest([states, generators])


def main(life: Life) -> None:
    """Restore, train to the end or to a stop, and leave with the status that this brings."""
    _prepare(life)
    stage = Stage(life)
    training = Training(life)
    if life.trainer_fault:
        os.environ["CHECKFREQ_FAULT"] = life.trainer_fault
        faults.reload()
    os.environ["CHECKFREQ_FAULT"] = life.worker_fault
    with managed(life, training) as manager:
        stage.say("made")
        loader = _loader(life, stage, manager)
        manager.restore()
        stage.say("restored", manager.global_step, time.monotonic())
        _train(stage, training, manager, loader)
        if manager.stopped:
            sys.exit(75)
        stage.reach("end")
        stage.say("end", training.bits())
    stage.say("closed", time.monotonic())
    if dist.is_initialized():
        dist.destroy_process_group()


def managed(life: Life, training: Training) -> CFManager:
    """The manager of a life."""
    per_rank = ("progress",) if life.world > 1 else ()
    return CFManager(
        life.chk_dir,
        CFCheckpoint(per_rank=per_rank, **training.tracked()),
        mode=CFMode.AUTO if life.chk_freq is None else CFMode.MANUAL,
        chk_freq=life.chk_freq,
        retention=KeepLast(2),
        config=CFConfig(
            **{"nice": 0, "meet_every_s": 0.05, "keep_in_memory_s": 0.0, **life.config}
        ),
    )


def _loader(life: Life, stage: Stage, manager: CFManager) -> CFIterator:
    loader = ResumableDataLoader(
        Pictures(BATCHES * BATCH_SIZE * life.world, stage),
        BATCH_SIZE,
        shuffle=True,
        seed=5,
        num_workers=life.workers,
    )
    return CFIterator(loader, cf_manager=manager, on_stop=life.on_stop)


def _train(stage: Stage, training: Training, manager: CFManager, loader: CFIterator) -> None:
    for epoch in loader.epochs(EPOCHS):
        for batch in loader:
            assert loader.last_ids is not None
            stage.say("batch", epoch, loader.last_ids.tolist(), digest(batch))
            stage.say("loss", epoch, training.learn(stage, manager, batch))
        if manager.stopped:
            return
        stage.reach("validation")
        value = training.validate()
        stage.reach("tail")
        training.scheduler.step()
        stage.say("tail", epoch, value)


def _prepare(life: Life) -> None:
    faulthandler.enable()
    multiprocessing.set_start_method("fork", force=True)  # for loaders, as is usual
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
    torch.set_num_threads(1)
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded((life.number if _has_checkpoint(life) else 0) * 64 + life.rank)
    if life.world == 1:
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{life.folder}/store-{life.number}", life.world)
    dist.init_process_group(
        "gloo", store=store, rank=life.rank, world_size=life.world, timeout=timedelta(seconds=60)
    )


def _has_checkpoint(life: Life) -> bool:
    """A first life draws the same numbers as any other; one that restores must not need to."""
    return life.chk_dir.exists() and any(life.chk_dir.glob("step-*"))


if __name__ == "__main__":  # under torchrun, which gives each rank its number
    life = Life(**json.loads(sys.argv[1]))
    main(replace(life, rank=int(os.environ["RANK"]), world=int(os.environ["WORLD_SIZE"])))
