"""Where an epoch ends: uneven groups, growing data, epochs that are cut short or counted anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from tests.silence.training import EVERY, data, digest, loss_of, tick, tried

Trained = tuple[nn.Module, torch.optim.Optimizer, CFManager]


def training(directory: str) -> Trained:
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint = CFCheckpoint(model=model, optimizer=optimizer)
    return model, optimizer, CFManager(directory, checkpoint, **EVERY)


def update(trained: Trained, batches: list[Any], kill: int) -> None:
    """One update with the gradients of ``batches``, unless it is the one to be killed at."""
    model, optimizer, manager = trained
    tick(manager, manager.update_attempts + 1 == kill)
    for x, y in batches:
        loss_of(model, x, y).backward()
    manager.weight_update()
    optimizer.zero_grad()


def uneven(directory: str, kill: int) -> tuple[str, int]:
    trained = model, _, manager = training(directory)
    with manager:
        iterator = CFIterator(data(60, 4), cf_manager=manager, accumulate=2)
        manager.restore()
        batches = iter(iterator.steps(24))
        while manager.global_step + iterator.is_using_batch < 24:
            update(trained, [next(batches), next(batches)], kill)
    return digest(model), manager.global_step


def test_uneven(tmp_path: Path) -> None:
    trial = tried(uneven, tmp_path, kills=(8, 1))
    assert trial.whole.result[1] == 24
    assert trial.is_exact
    assert not trial.warnings
