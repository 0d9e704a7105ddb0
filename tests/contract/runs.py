"""A small training with every kind of state that a forward pass or an update can change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast
from iterators import CFIterator
from iterators.testing import digest

NUM_SAMPLES = 12
BATCH = 4


class Net(nn.Module):
    """BatchNorm and dropout: its forward pass changes state and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Training:
    """Model, optimizer, scheduler and the generators; ``seed`` makes two of them differ."""

    def __init__(self, seed: int = 0, **tracked: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.chk = CFCheckpoint(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, **tracked
        )

    def backward(self, x: torch.Tensor | None = None) -> None:
        """Forward and backward on ``x``, or on random input."""
        x = torch.randn(BATCH, 3) if x is None else x
        self.model(x).square().mean().backward()

    def update(self, manager: CFManager, x: torch.Tensor | None = None) -> None:
        """One iteration, up to its boundary."""
        self.backward(x)
        manager.weight_update()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def steps(self, manager: CFManager, num: int) -> list[str]:
        """``num`` iterations with their boundaries; the bits at each boundary."""
        bits = []
        for _ in range(num):
            self.update(manager)
            manager.step()
            bits.append(self.bits())
        return bits

    def bits(self) -> str:
        """A digest of every bit of state, generators included."""
        return digest([self.state_bits(), generator_bits()])

    def state_bits(self) -> str:
        """A digest of the tracked objects."""
        parts = (self.model, self.optimizer, self.scheduler)
        return digest([part.state_dict() for part in parts])


def generator_bits() -> str:
    """A digest of Python's, NumPy's and torch's generators."""
    return digest([random.getstate(), list(np.random.get_state()), torch.get_rng_state()])


def managed(chk_dir: Path, chk: CFCheckpoint, **changes: Any) -> CFManager:
    """A manager with short deadlines; MANUAL, by default without periodic checkpoints, and with a
    retention that does not look at the clock."""
    settings: dict[str, Any] = {
        "mode": CFMode.MANUAL,
        "chk_freq": 0,
        "retention": KeepLast(3),
        "config": config(),
    }
    return CFManager(chk_dir, chk, **{**settings, **changes})


@contextmanager
def running(
    chk_dir: Path, *, seed: int = 0, **changes: Any
) -> Iterator[tuple[Training, CFManager]]:
    """A training and its manager, which is closed at the end."""
    training = Training(seed)
    with managed(chk_dir, training.chk, **changes) as manager:
        yield training, manager


def config(**changes: Any) -> CFConfig:
    """Settings for tests: settled state is checked at every barrier, no wait is long."""
    settings: dict[str, Any] = {
        "verify_settled": True,
        "takeover_s": 120.0,
        "close_timeout_s": 60.0,
        "persist_timeout_s": 60.0,
    }
    return CFConfig(**{**settings, **changes})


def written(chk_dir: Path, num: int = 3, seed: int = 0, **changes: Any) -> list[str]:
    """Train ``num`` iterations with a checkpoint at each; the bits at each boundary."""
    with running(chk_dir, seed=seed, **{"chk_freq": 1, **changes}) as (training, manager):
        bits = []
        for _ in range(num):
            bits += training.steps(manager, 1)
            manager.wait()
    return bits


def restored(chk_dir: Path, step: int | None = None) -> Training:
    """Another training, which got what a checkpoint holds: the newest, or that of ``step``."""
    with running(chk_dir, seed=9) as (training, manager):
        assert manager.restore(step)
    return training


def loader(num_samples: int = NUM_SAMPLES, **changes: Any) -> DataLoader[Any]:
    """Three batches of four rows, shuffled."""
    rows = torch.arange(num_samples * 3, dtype=torch.float32).reshape(-1, 3) / 10
    settings: dict[str, Any] = {"batch_size": BATCH, "shuffle": True}
    return DataLoader(TensorDataset(rows), **{**settings, **changes})


def train(
    training: Training,
    manager: CFManager,
    iterator: CFIterator,
    epochs: int,
    *,
    each: Callable[[], None] = lambda: None,
    tail: Callable[[], None] = lambda: None,
) -> None:
    """The loop of the README; ``each`` runs after every update, ``tail`` after every epoch."""
    for _ in iterator.epochs(epochs):
        for (x,) in iterator:
            training.update(manager, x)
            each()
        tail()
