"""torch's own samplers, and a BatchSampler under another name."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from tests.silence.training import EVERY, digest, tick, tried


class NamedOtherwise(BatchSampler):
    pass


def train(directory: str, kill: int, *, kind: str) -> str:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 8))
    if kind == "weighted":
        loader = DataLoader(dataset, 8, sampler=WeightedRandomSampler(torch.arange(64.0), 60))
    else:
        batches = NamedOtherwise(RandomSampler(dataset, replacement=True), 8, False)
        loader = DataLoader(dataset, batch_sampler=batches)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        train_loader = CFIterator(loader, cf_manager=manager)
        manager.restore()
        for _ in train_loader.epochs(3):
            for (x,) in train_loader:
                tick(manager, manager.global_step + 1 == kill)
                model(x).square().mean().backward()
                manager.weight_update()
                optimizer.zero_grad()
    return digest(model)


@pytest.mark.parametrize("kind", ["weighted", "named otherwise"])
def test_samplers_are_exact_without_a_word(kind: str, tmp_path: Path) -> None:
    trial = tried(partial(train, kind=kind), tmp_path)
    assert trial.is_exact
    assert not trial.warnings
