"""A group that is added in the course of training: ``peek()`` tells before the objects are made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from checkfreq import CFCheckpoint, CFManager
from checkfreq.errors import MismatchError
from iterators import CFIterator
from tests.silence.training import EVERY, data, digest, loss_of, tick, tried


def thaw(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.01})


def train(directory: str, kill: int) -> str:
    loader = data()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.05)
    saved = CFManager.peek(directory)
    if saved is not None and len(saved.param_groups["optimizer"]) > 1:
        assert saved.epochs["train"] >= 1
        thaw(model, optimizer)
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        manager.restore()
        for epoch in batches.epochs(3):
            if epoch == 1 and len(optimizer.param_groups) == 1:
                thaw(model, optimizer)
            for x, y in batches:
                tick(manager, manager.global_step + 1 == kill)
                loss_of(model, x, y).backward()
                manager.weight_update()
                optimizer.zero_grad()
    return digest(model)


def test_a_group_that_was_added_comes_back(tmp_path: Path) -> None:
    """Killed in the first epoch, at the first update after the end of it, and after the thaw."""
    trial = tried(train, tmp_path, kills=(6, 9, 13))
    assert trial.is_exact
    assert not trial.warnings


def test_peek_says_what_a_checkpoint_holds(tmp_path: Path) -> None:
    assert CFManager.peek(tmp_path / "nothing") is None
    model = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(
        [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.1}], lr=0.05
    )
    with CFManager(tmp_path, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        model(torch.ones(1, 8)).sum().backward()
        manager.weight_update()
        manager.step()
        manager.wait()
        saved = CFManager.peek(tmp_path)  # beside a run of this process
    assert saved is not None
    assert saved.step == 1
    assert saved.epochs == {}
    assert saved.param_groups == {"optimizer": (1, 1)}
    assert saved.shapes["model"] == {"weight": (3, 8), "bias": (3,)}
    assert saved.shapes["optimizer"]["state.1.exp_avg"] == (3,)


def test_a_mismatch_of_groups_names_peek(tmp_path: Path) -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD([{"params": [one]} for one in model.parameters()], lr=0.05)
    with CFManager(tmp_path, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        manager.step()
    one_group = torch.optim.SGD(model.parameters(), lr=0.05)
    chk = CFCheckpoint(model=model, optimizer=one_group)
    with (
        CFManager(tmp_path, chk, **EVERY) as manager,
        pytest.raises(MismatchError, match=r"CFManager\.peek\(chk_dir\)"),
    ):
        manager.restore()
