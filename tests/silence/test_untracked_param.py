"""What a tracked optimizer steps and no tracked object holds is saved with it, and named once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkfreq import CFManager
from tests.silence.training import Program, data, digest, loss_of, start, trained, tried


def log_alpha(directory: str, kill: int) -> str:
    model, log_alpha = nn.Linear(8, 3), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.AdamW([*model.parameters(), log_alpha], lr=0.05)

    def update(manager: CFManager, batch: Any) -> None:
        x, y = batch
        nn.functional.cross_entropy(model(x) * log_alpha.exp(), y).backward()
        manager.weight_update()
        optimizer.zero_grad()

    trained(directory, kill, data(), update, epochs=2, opt=optimizer, model=model)
    return digest(model, log_alpha)


def masters_in_fp32(directory: str, kill: int) -> str:
    model = nn.Linear(8, 3).bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.05)

    def update(manager: CFManager, batch: Any) -> None:
        x, y = batch
        nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
        for one, master in zip(model.parameters(), masters, strict=True):
            assert one.grad is not None
            master.grad = one.grad.float()
        manager.weight_update()
        model.zero_grad()
        with torch.no_grad():
            for one, master in zip(model.parameters(), masters, strict=True):
                one.copy_(master)

    trained(directory, kill, data(), update, epochs=2, opt=optimizer, model=model)
    return digest(model, masters)


def forgotten_module(directory: str, kill: int) -> str:
    model, head = nn.Linear(8, 5), nn.Linear(5, 3)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=0.05)

    def update(manager: CFManager, batch: Any) -> None:
        x, y = batch
        loss_of(head, model(x), y).backward()
        manager.weight_update()
        optimizer.zero_grad()

    trained(directory, kill, data(), update, epochs=2, opt=optimizer, model=model)
    return digest(model, head)


def all_tracked(directory: str, kill: int) -> str:
    model, alphas = nn.Linear(8, 3), [torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.AdamW([*model.parameters(), *alphas], lr=0.05)

    def update(manager: CFManager, batch: Any) -> None:
        x, y = batch
        nn.functional.cross_entropy(model(x) * alphas[0].exp(), y).backward()
        manager.weight_update()
        optimizer.zero_grad()

    trained(directory, kill, data(), update, epochs=2, opt=optimizer, model=model, alphas=alphas)
    return digest(model, alphas)


@pytest.mark.parametrize(
    ("program", "names"),
    [
        (
            log_alpha,
            (
                "opt steps parameters that no tracked object holds: log_alpha (parameter 2, ",
                "float32[1])",
                'CFCheckpoint(..., log_alpha={"log_alpha": log_alpha})',
            ),
        ),
        (
            masters_in_fp32,
            (
                "masters[0] (parameter 0, float32[3, 8]); masters[1] (parameter 1, ",
                "CFCheckpoint(..., masters=masters)",
            ),
        ),
    ],
)
def test_what_the_optimizer_steps_is_exact_and_named_once_in_each_start(
    program: Program, names: tuple[str, ...], tmp_path: Path
) -> None:
    trial = tried(program, tmp_path)
    assert trial.is_exact
    for begun in (trial.whole, *trial.killed, trial.resumed):
        (text,) = begun.warnings
        assert all(name in text for name in names)


def test_a_forgotten_module_is_named(tmp_path: Path) -> None:
    (text,) = start(forgotten_module, tmp_path).warnings
    assert "head.weight (parameter 2" in text
    assert "CFCheckpoint(..., head=head)" in text


def test_parameters_in_a_tracked_list_are_not_named(tmp_path: Path) -> None:
    begun = start(all_tracked, tmp_path)
    assert begun.exit_code == 0, begun.error
    assert not begun.warnings
