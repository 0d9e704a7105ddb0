"""Updates that nobody sees: a WARNING, or counted where the optimizer inside of another steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from tests.silence.training import EVERY, Start, data, digest, loss_of, start, tick, tried


def by_hand(directory: str, *, num_epochs: int, write: Callable[[nn.Module], None], n: int) -> int:
    """Train, where nothing tracked steps; returns the boundaries passed."""
    loader, model = data(n=n), nn.Linear(8, 3)
    with CFManager(directory, CFCheckpoint(model=model)) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        manager.restore()
        for _ in batches.epochs(num_epochs):
            for x, y in batches:
                loss_of(model, x, y).backward()
                write(model)
                model.zero_grad()
        return manager.global_step


def subtract(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)


def subtract_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data -= 0.1 * parameter.grad


def no_boundary(directory: str, kill: int) -> int:
    return by_hand(directory, num_epochs=3, write=subtract, n=64)


def no_boundary_in_data(directory: str, kill: int) -> int:
    return by_hand(directory, num_epochs=1, write=subtract_data, n=8 * 60)


def trains_nothing(directory: str, kill: int) -> int:
    return by_hand(directory, num_epochs=1, write=lambda model: None, n=64)


def said(begun: Start) -> list[str]:
    assert begun.result == 0, begun.error
    return begun.warnings


def test_no_boundary(tmp_path: Path) -> None:
    first, last = said(start(no_boundary, tmp_path))
    assert "weights have changed, but no weight update was seen in 8 batches" in first
    assert "with cf_manager.updating():" in first
    assert "no checkpoint was taken: no weight update was seen" in last


def test_unseen_updates_are_told_after_50_batches(tmp_path: Path) -> None:
    first, _ = said(start(no_boundary_in_data, tmp_path))
    assert "weights have changed, but no weight update was seen in 50 batches" in first


def test_a_whole_epoch_without_an_update_is_told(tmp_path: Path) -> None:
    first, _ = said(start(trains_nothing, tmp_path))
    assert "an epoch is over, but no weight update was seen in 8 batches" in first
    assert "marks_steps=False" in first


def swaps_its_optimizer(directory: str, kill: int) -> int:
    """After an epoch another optimizer takes over, which nobody tracks."""
    loader, model = data(), nn.Linear(8, 3)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        for epoch in batches.epochs(3):
            if epoch == 1:
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for x, y in batches:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
    return manager.global_step


def test_an_optimizer_that_takes_over_untracked_is_named(tmp_path: Path) -> None:
    begun = start(swaps_its_optimizer, tmp_path)
    assert begun.result == 8
    epoch, optimizer = begun.warnings
    assert "an epoch is over, but no weight update was seen in 8 batches" in epoch
    assert "the Adam 'optimizer' steps parameters that are tracked" in optimizer
    assert optimizer.endswith("CFCheckpoint(..., optimizer_2=optimizer)")


def accumulates(directory: str, kill: int) -> list[int]:
    """One update for 60 batches, then one for all batches of an epoch."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(data(n=8 * 60), cf_manager=manager)
        for _ in batches.epochs(2):
            for x, y in batches:
                loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [manager.global_step, batches.epoch]


def test_gradients_that_accumulate_over_an_epoch_are_no_sign(tmp_path: Path) -> None:
    begun = start(accumulates, tmp_path)
    assert begun.result == [2, 2]
    assert begun.warnings == []


def test_updates_without_a_call_of_step_are_told_at_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CFManager(tmp_path, CFCheckpoint(model=model, optimizer=optimizer)):
        for _ in range(3):
            optimizer.step()
    (text,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "3 weight update(s) were seen, and no boundary was passed" in text
    assert "cf_manager.step()" in text


# ---- the two steps of sharpness-aware minimisation


class SAM(torch.optim.Optimizer):
    """Steps an optimizer inside of it, and is never asked to ``step`` itself."""

    def __init__(self, params: Any, **base: Any) -> None:
        super().__init__(params, {"rho": 0.05, **base})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **base)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.clone()
                parameter.add_(parameter.grad, alpha=group["rho"])

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()


def trained_by_sam(directory: str, kill: int, *, tracks_base: bool, **base: Any) -> list[Any]:
    loader, model = data(), nn.Linear(8, 3)
    sam = SAM(model.parameters(), **base)
    more = {"sam_base": sam.base_optimizer} if tracks_base else {}
    chk = CFCheckpoint(model=model, sam=sam, **more)
    with CFManager(directory, chk, **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        manager.restore()
        for _ in batches.epochs(3):
            for x, y in batches:
                tick(manager, manager.global_step + 1 == kill)
                for step in (sam.first_step, sam.second_step):
                    loss_of(model, x, y).backward()
                    step()
                    model.zero_grad()
    return [manager.global_step, digest(model, sam, sam.base_optimizer)]


def sam(directory: str, kill: int) -> list[Any]:
    return trained_by_sam(directory, kill, tracks_base=False, lr=0.05)


def sam_with_momentum(directory: str, kill: int) -> list[Any]:
    return trained_by_sam(directory, kill, tracks_base=False, lr=0.05, momentum=0.9)


def sam_with_momentum_tracked(directory: str, kill: int) -> list[Any]:
    return trained_by_sam(directory, kill, tracks_base=True, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("program", [sam, sam_with_momentum_tracked])
def test_sam_passes_a_boundary_at_each_second_step(
    program: Callable[[str, int], list[Any]], tmp_path: Path
) -> None:
    trial = tried(program, tmp_path)
    assert trial.whole.result[0] == 24
    assert trial.is_exact
    assert trial.warnings == []


def test_a_momentum_inside_of_sam_that_nobody_saves_is_named(tmp_path: Path) -> None:
    (warning,) = start(sam_with_momentum, tmp_path).warnings
    assert "the SGD 'sam.base_optimizer'" in warning
    assert warning.endswith("CFCheckpoint(..., sam_base_optimizer=sam.base_optimizer)")
