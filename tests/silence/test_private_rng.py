"""A dataset that augments with generators of its own, as Albumentations does."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from tests.silence.training import EVERY, digest, loss_of, tick, tried


class Own(Dataset[Any]):
    def __init__(self) -> None:
        self.x = torch.randn(64, 8)
        self.numpy, self.python = np.random.default_rng(3), random.Random(4)
        self.torch = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(8, generator=self.torch) + self.numpy.normal() + self.python.random()
        return self.x[index] + noise.float(), self.x[index, :3].argmax()


def train(directory: str, kill: int, *, workers: int) -> str:
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    context = "fork" if workers else None
    loader = DataLoader(
        Own(), 8, shuffle=True, num_workers=workers, multiprocessing_context=context
    )
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        manager.restore()
        for _ in batches.epochs(3):
            for x, y in batches:
                tick(manager, manager.global_step + 1 == kill)
                loss_of(model, x, y).backward()
                manager.weight_update()
                optimizer.zero_grad()
    return digest(model)


@pytest.mark.parametrize("workers", [0, 2])
def test_private_generators_are_exact_without_a_word(workers: int, tmp_path: Path) -> None:
    trial = tried(partial(train, workers=workers), tmp_path)
    assert trial.is_exact
    assert not trial.warnings
