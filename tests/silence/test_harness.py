"""The harness itself: a tracked run is exact without a warning, one that forgets a state is not."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from tests.silence.training import EVERY, data, digest, loss_of, tick, tried


def train(directory: str, kill: int) -> str:
    loader = data()
    model = nn.Linear(8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
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


def forgets_its_sum(directory: str, kill: int) -> float:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    total = 0.0
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        manager.restore()
        while manager.global_step < 8:
            tick(manager, manager.global_step + 1 == kill)
            model(torch.ones(1, 8)).sum().backward()
            manager.weight_update()
            optimizer.zero_grad()
            total += 1.0
            manager.step()
    return total


def test_a_tracked_run_is_exact_and_says_nothing(tmp_path: Path) -> None:
    trial = tried(train, tmp_path, kills=(5, 11))
    assert trial.is_exact
    assert not trial.warnings
    assert any("restored step" in text for text in trial.resumed.infos)


def test_a_forgotten_state_shows_in_the_result(tmp_path: Path) -> None:
    trial = tried(forgets_its_sum, tmp_path, kills=(5,))
    assert trial.whole.result == 8.0
    assert not trial.is_exact
