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
from tests.silence.training import EVERY, data, digest, loss_of, trained, tried


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def subtract(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)


def subtract_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data -= 0.1 * parameter.grad


@pytest.mark.parametrize(
    ("write", "num_samples", "said"),
    [
        (
            subtract,
            64,
            (
                "weights have changed, but no weight update was seen in 8 batches",
                "with cf_manager.updating():",
            ),
        ),
        (
            subtract_data,
            8 * 60,
            ("weights have changed, but no weight update was seen in 50 batches",),
        ),
        (
            lambda model: None,
            64,
            ("an epoch is over, but no weight update was seen in 8 batches", "marks_steps=False"),
        ),
    ],
    ids=["by hand", "in data, in a long epoch", "not at all"],
)
def test_where_nothing_tracked_steps_it_is_told_and_at_the_end_that_nothing_was_saved(
    write: Callable[[nn.Module], None],
    num_samples: int,
    said: tuple[str, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader, model = data(n=num_samples), nn.Linear(8, 3)
    with CFManager(tmp_path, CFCheckpoint(model=model)) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        for _ in batches.epochs(2):
            for x, y in batches:
                loss_of(model, x, y).backward()
                write(model)
                model.zero_grad()
        assert manager.global_step == 0
    first, last = warnings(caplog)
    assert all(part in first for part in said)
    assert "no checkpoint was taken: no weight update was seen" in last


def test_an_optimizer_that_takes_over_untracked_after_an_epoch_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader, model = data(), nn.Linear(8, 3)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CFManager(tmp_path, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        for epoch in batches.epochs(3):
            if epoch == 1:
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for x, y in batches:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
    assert manager.global_step == 8
    over, named = warnings(caplog)
    assert "an epoch is over, but no weight update was seen in 8 batches" in over
    assert "the Adam 'optimizer' steps parameters that are tracked" in named
    assert named.endswith("CFCheckpoint(..., optimizer_2=optimizer)")


def test_gradients_that_accumulate_over_an_epoch_are_no_sign(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One update for 60 batches, then one for all batches of an epoch."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CFManager(tmp_path, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(data(n=8 * 60), cf_manager=manager)
        for _ in batches.epochs(2):
            for x, y in batches:
                loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (manager.global_step, batches.epoch) == (2, 2)
    assert warnings(caplog) == []


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


def with_sam(directory: str, kill: int) -> list[Any]:
    loader, model = data(), nn.Linear(8, 3)
    sam = SAM(model.parameters(), lr=0.05, momentum=0.9)

    def update(manager: CFManager, batch: Any) -> None:
        for step in (sam.first_step, sam.second_step):
            loss_of(model, *batch).backward()
            step()
            model.zero_grad()

    tracked = {"model": model, "sam": sam, "sam_base": sam.base_optimizer}
    manager = trained(directory, kill, loader, update, **tracked)
    return [manager.global_step, digest(*tracked.values())]


def test_sam_passes_a_boundary_at_each_second_step(tmp_path: Path) -> None:
    trial = tried(with_sam, tmp_path)
    assert trial.whole.result[0] == 24
    assert trial.is_exact
    assert trial.warnings == []
