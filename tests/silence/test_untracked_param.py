"""What a tracked optimizer steps and no tracked object holds is saved with it, and named once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from tests.silence.training import EVERY, Trial, data, digest, loss_of, tick, tried


def _trained(
    directory: str,
    kill: int,
    optimizer: Any,
    update: Callable[[CFManager, Any, Any], None],
    **more: Any,
) -> None:
    loader = data()
    with CFManager(directory, CFCheckpoint(opt=optimizer, **more), **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        manager.restore()
        for _ in batches.epochs(2):
            for x, y in batches:
                tick(manager, manager.global_step + 1 == kill)
                update(manager, x, y)


def log_alpha(directory: str, kill: int) -> str:
    model, log_alpha = nn.Linear(8, 3), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.AdamW([*model.parameters(), log_alpha], lr=0.05)

    def update(manager: CFManager, x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(model(x) * log_alpha.exp(), y).backward()
        manager.weight_update()
        optimizer.zero_grad()

    _trained(directory, kill, optimizer, update, model=model)
    return digest(model, log_alpha)


def masters_in_fp32(directory: str, kill: int) -> str:
    model = nn.Linear(8, 3).bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.05)

    def update(manager: CFManager, x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
        for one, master in zip(model.parameters(), masters, strict=True):
            assert one.grad is not None
            master.grad = one.grad.float()
        manager.weight_update()
        model.zero_grad()
        with torch.no_grad():
            for one, master in zip(model.parameters(), masters, strict=True):
                one.copy_(master)

    _trained(directory, kill, optimizer, update, model=model)
    return digest(model, masters)


def forgotten_module(directory: str, kill: int) -> str:
    model, head = nn.Linear(8, 5), nn.Linear(5, 3)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=0.05)

    def update(manager: CFManager, x: Tensor, y: Tensor) -> None:
        loss_of(head, model(x), y).backward()
        manager.weight_update()
        optimizer.zero_grad()

    _trained(directory, kill, optimizer, update, model=model)
    return digest(model, head)


def all_tracked(directory: str, kill: int) -> str:
    model, alphas = nn.Linear(8, 3), [torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.AdamW([*model.parameters(), *alphas], lr=0.05)

    def update(manager: CFManager, x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(model(x) * alphas[0].exp(), y).backward()
        manager.weight_update()
        optimizer.zero_grad()

    _trained(directory, kill, optimizer, update, model=model, alphas=alphas)
    return digest(model, alphas)


def _warnings_of_each_start(trial: Trial) -> Sequence[str]:
    starts = (trial.whole, *trial.killed, trial.resumed)
    assert all(len(start.warnings) == 1 for start in starts)
    return trial.warnings


def test_untracked_param(tmp_path: Path) -> None:
    trial = tried(log_alpha, tmp_path)
    assert trial.is_exact
    for text in _warnings_of_each_start(trial):
        assert "opt steps parameters that no tracked object holds: log_alpha (parameter 2, " in text
        assert "float32[1])" in text
        assert 'CFCheckpoint(..., log_alpha={"log_alpha": log_alpha})' in text


def test_masters(tmp_path: Path) -> None:
    trial = tried(masters_in_fp32, tmp_path)
    assert trial.is_exact
    for text in _warnings_of_each_start(trial):
        assert "masters[0] (parameter 0, float32[3, 8]); masters[1] (parameter 1, " in text
        assert "CFCheckpoint(..., masters=masters)" in text


def test_a_forgotten_module_is_exact_and_named(tmp_path: Path) -> None:
    trial = tried(forgotten_module, tmp_path)
    assert trial.is_exact
    for text in _warnings_of_each_start(trial):
        assert "head.weight (parameter 2" in text
        assert "CFCheckpoint(..., head=head)" in text


def test_parameters_in_a_tracked_list_are_not_named(tmp_path: Path) -> None:
    trial = tried(all_tracked, tmp_path)
    assert trial.is_exact
    assert not trial.warnings
