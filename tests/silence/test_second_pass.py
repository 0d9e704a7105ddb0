"""A second loop over the training data within an epoch: an evaluation, or an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator, IterationStateError
from tests.silence.training import EVERY, data, digest, loss_of, tick, tried


def second_pass(directory: str, kill: int) -> tuple[str, int, list[int]]:
    loader = data()
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    counted = []
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        num_updates = manager.global_step if manager.restore() else 0
        for _ in batches.epochs(4):
            for x, y in batches:
                num_updates += 1
                tick(manager, num_updates == kill)
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
                if batches.batch == 2:  # in mid-epoch too
                    counted.append(sum(len(y) for _, y in batches.evaluate()))
            with torch.no_grad():
                counted.append(sum(len(y) for _, y in batches))
        return digest(model), manager.global_step, counted[-2:]


def test_second_pass_under_no_grad_is_an_evaluation_and_moves_nothing(tmp_path: Path) -> None:
    trial = tried(second_pass, tmp_path, kills=(11,))
    assert trial.whole.result[1:] == (32, [64, 64])
    assert trial.is_exact
    assert not trial.warnings


def test_second_pass_that_could_train_is_an_error_that_names_evaluate(tmp_path: Path) -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with CFManager(tmp_path, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(data(), cf_manager=manager)
        turns = batches.epochs(2)
        next(turns)
        for _ in batches:
            manager.weight_update()
        with pytest.raises(IterationStateError, match=r"in train_loader\.evaluate\(\)"):
            iter(batches)
        assert next(turns) == 1
        assert len(list(batches)) == len(batches)
