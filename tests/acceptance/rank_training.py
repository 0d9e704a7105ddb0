"""Trainings as users write them: DDP and FSDP2 under a manager and an iterator.

Each rank reports every batch (the ids in it and its bits), loss and end of an epoch as it
happens, so that a killed life can be held against a whole one, and its own state at the end.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from checkfreq import CFCheckpoint, CFManager, CFMode
from iterators import CFIterator, ResumableDataLoader
from iterators.testing import digest
from tests.acceptance.cases import Block
from tests.acceptance.ranks import Rank, config

NUM_SAMPLES = 46  # which no global batch divides
EPOCHS = 3


class Pictures(Dataset[tuple[Tensor, int]]):
    """``[3, 6, 6]`` pictures of four classes, augmented with all three global generators."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._pictures = torch.rand(NUM_SAMPLES, 3, 6, 6, generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self._pictures[index] + index % 4
        if random.random() < 0.5:
            picture = picture.flip(-1)
        return picture * float(np.random.uniform(0.8, 1.2)) + 0.1 * torch.randn(3, 6, 6), index % 4


def small_resnet() -> nn.Sequential:
    """Convolutions, BatchNorm (not synchronised) and dropout."""
    stem = [nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(24, 4)]
    return nn.Sequential(*stem, Block(6), *head)


class Language(nn.Module):
    """A transformer over pictures read as rows: attention, layer norms, dropout, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.places = nn.Parameter(torch.zeros(18, 16))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(16, 4)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.embed(pictures.flatten(1, 2)) + self.places
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.out(x.mean(1))
        return scores * 1.0  # FSDP2 warns of a view


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same weights on all ranks, whatever the process was seeded with."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return make()


class Job:
    """One rank's objects and what it does with a batch."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.accumulate = rank, rank.settings.get("accumulate")
        self.model = self.make_model()
        self.optimizer = self.make_optimizer()
        schedulers = torch.optim.lr_scheduler
        self.scheduler = schedulers.StepLR(self.optimizer, 5, gamma=0.7)
        self.count = {"batches": 0}

    def make_model(self) -> nn.Module:
        raise NotImplementedError

    def make_optimizer(self) -> torch.optim.Optimizer:
        raise NotImplementedError

    def tracked(self) -> dict[str, Any]:
        found = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**found, "count": self.count}

    def before_restore(self) -> None:
        pass

    def not_yet(self) -> AbstractContextManager[Any]:
        """Around a backward pass whose gradients are not exchanged yet."""
        return nullcontext()

    def learn(self, manager: CFManager, loader: CFIterator, batch: Any) -> str:
        """Use one batch; returns the loss's bits."""
        self.count["batches"] += 1
        due = self.accumulate is None or self.count["batches"] % self.accumulate == 0
        with nullcontext() if due else self.not_yet():
            loss = self.loss(loader, batch)
            loss.backward()
        if due:
            self.update(manager)
        return loss.item().hex()

    def loss(self, loader: CFIterator, batch: Any) -> Tensor:
        """The mean over the samples that count: a rank's pad does not."""
        pictures, labels = batch
        weights = loader.last_weights
        assert weights is not None
        losses = F.cross_entropy(self.model(pictures), labels, reduction="none")
        return (losses * torch.tensor(weights)).sum() / len(losses)

    def update(self, manager: CFManager) -> None:
        manager.weight_update()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def synchronise(self) -> None:
        """What the next forward pass would do to buffers, so that all ranks' states compare."""

    def tail(self, manager: CFManager) -> None:
        """Validation would be here; a group not complete yet goes on in the next epoch."""


class DdpJob(Job):
    """Above two ranks DDP rebuilds its buckets after the first backward, in another order."""

    def make_model(self) -> nn.Module:
        settings = self.rank.settings
        own_buffers = {"broadcast_buffers": False} if settings.get("own_buffers") else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of newer torch, which renames it
            return DistributedDataParallel(
                seeded(small_resnet),
                find_unused_parameters=self.rank.world > 2 and not settings.get("throwaway"),
                **own_buffers,
            )

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def before_restore(self) -> None:
        """Two passes that count for nothing settle the buckets, in place of the argument."""
        if not self.rank.settings.get("throwaway"):
            return
        self.model.eval()  # or BatchNorm would learn from them
        for _ in range(2):
            self.model(torch.zeros(2, 3, 6, 6)).sum().backward()
        self.model.train()
        self.optimizer.zero_grad()

    def synchronise(self) -> None:
        if not self.rank.settings.get("own_buffers"):
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)

    def not_yet(self) -> AbstractContextManager[Any]:
        return self.model.no_sync()


class FsdpJob(Job):
    """FSDP2, a unit for each block."""

    def make_model(self) -> nn.Module:
        model = seeded(Language)
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (self.rank.world,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)


class MixedJob(FsdpJob):
    """FSDP2 for the model; beside it a head in DDP, an average of it, and a counter."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.head = DistributedDataParallel(seeded(lambda: nn.Linear(4, 4)))
        self.head_steps = torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)
        self.progress: dict[str, Any] = {"seen": 0}

    def tracked(self) -> dict[str, Any]:
        names = ("head", "head_steps", "progress")
        return {**super().tracked(), **{name: getattr(self, name) for name in names}}

    def loss(self, loader: CFIterator, batch: Any) -> Tensor:
        pictures, labels = batch
        self.progress["seen"] += 1
        return F.cross_entropy(self.head(self.model(pictures)), labels)

    def update(self, manager: CFManager) -> None:
        manager.weight_update("head_steps")
        manager.weight_update("optimizer")
        self.head_steps.zero_grad()
        self.optimizer.zero_grad()
        self.scheduler.step()


JOBS: dict[str, type[Job]] = {"ddp": DdpJob, "fsdp": FsdpJob, "mixed": MixedJob}


def train(rank: Rank) -> None:
    """Restore and train to the end, reporting each event as (kind, key, step, bits)."""
    job = JOBS[rank.settings["job"]](rank)
    job.before_restore()
    chk = CFCheckpoint(**job.tracked())
    rank.arm_trainer()
    with CFManager(
        rank.chk_dir,
        chk,
        mode=CFMode.MANUAL,
        chk_freq=rank.settings.get("chk_freq", 2),
        config=config(rank),
    ) as manager:
        loader = CFIterator(
            ResumableDataLoader(Pictures(), rank.settings.get("batch", 4), shuffle=True, seed=5),
            cf_manager=manager,
            accumulate=job.accumulate,
        )
        if manager.restore():
            rank.send("restored", manager.global_step)
        _learn(rank, job, manager, loader)
    job.synchronise()
    rank.send("end", bits_of(job.tracked()))


def _learn(rank: Rank, job: Job, manager: CFManager, loader: CFIterator) -> None:
    for epoch in loader.epochs(EPOCHS):
        for batch in loader:
            ids, weights = loader.last_ids, loader.last_weights
            assert ids is not None
            assert weights is not None
            key = (epoch, loader.batch)
            served = [int(i) for i, weight in zip(ids, weights, strict=True) if weight]
            rank.send("batch", key, manager.global_step, (served, digest(batch)))
            rank.send("loss", key, manager.global_step, job.learn(manager, loader, batch))
            rank.send("durable", manager.stats()["last_durable_step"] or 0)
            _keep_up(rank, manager)
        job.tail(manager)
        rank.send("tail", (epoch, -1), manager.global_step, None)


def _keep_up(rank: Rank, manager: CFManager) -> None:
    """A slow disk must not make a kill cost everything: all ranks wait at the same steps."""
    if manager.global_step % rank.settings.get("wait_every", 6) == 0:
        manager.wait()


def bits_of(tracked: dict[str, Any]) -> dict[str, str]:
    """Digests of all that this rank's training can depend on, by name."""
    found = {name: digest(plain(state_of(value))) for name, value in tracked.items()}
    generators = [random.getstate(), list(np.random.get_state()), torch.get_rng_state()]
    return {**found, "generators": digest(generators)}


def state_of(value: Any) -> Any:
    """Its state dict."""
    return value if isinstance(value, dict) else value.state_dict()


def plain(value: Any, *, whole: bool = False) -> Any:
    """A state with this rank's part in place of each DTensor, or with the ``whole`` tensor."""
    match value:
        case DTensor():
            return value.full_tensor() if whole else value.to_local()
        case dict():
            return {key: plain(one, whole=whole) for key, one in value.items()}
        case list() | tuple():
            return [plain(one, whole=whole) for one in value]
        case _:
            return value


def whole_state(tracked: dict[str, Any]) -> dict[str, str]:
    """Digests of the full tensors, by name and key: the same at any world. Collective."""
    found = {}
    for name in ("model", "optimizer"):
        for key, value in leaves(plain(state_of(tracked[name]), whole=True), name):
            found[key] = digest(value.detach().clone() if isinstance(value, Tensor) else value)
    return found


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Paths and leaves of a tree."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{path}.{key}")
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from leaves(one, f"{path}[{index}]")
    else:
        yield path, value


def managed(rank: Rank, job: Job) -> CFManager:
    """A manager that checkpoints when it is asked to."""
    return CFManager(
        rank.chk_dir,
        CFCheckpoint(**job.tracked()),
        mode=CFMode.MANUAL,
        chk_freq=0,
        config=config(rank),
    )


def save_some(rank: Rank) -> None:
    """Train some steps, save, and report the whole state."""
    job = JOBS[rank.settings["job"]](rank)
    with managed(rank, job) as manager:
        generator = torch.Generator().manual_seed(rank.rank)
        for _ in range(3):
            loss = job.model(torch.rand(4, 3, 6, 6, generator=generator)).square().mean()
            loss.backward()
            job.update(manager)
            manager.step()
        manager.save(wait=True)
        job.synchronise()
        rank.send("whole", whole_state(job.tracked()))


def restore_whole(rank: Rank) -> None:
    """Restore at this world, and report the whole state; then one update must be possible."""
    job = JOBS[rank.settings["job"]](rank)
    with managed(rank, job) as manager:
        assert manager.restore()
        rank.send("whole", whole_state(job.tracked()))
        job.model(torch.rand(4, 3, 6, 6)).square().mean().backward()
        job.update(manager)
        manager.step()
