"""Optimizers and schedulers in the wrappers of other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkfreq import CFCheckpoint
from checkfreq.errors import StateError
from tests.contract.runs import managed

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Prepared:
    """A model, an optimizer and a schedule as ``Accelerator.prepare`` returns them."""

    def __init__(self, seed: int, *, accumulate: int = 1) -> None:
        torch.manual_seed(seed)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )
        self.chk = CFCheckpoint(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler
        )

    def backward(self) -> None:
        self.accelerator.backward(self.model(torch.ones(3, 4)).square().mean())


def test_what_accelerate_prepares_is_tracked_by_what_is_inside(tmp_path: Path) -> None:
    first = Prepared(1)
    assert type(first.chk.tracked["optimizer"]) is torch.optim.AdamW
    assert type(first.chk.tracked["scheduler"]) is torch.optim.lr_scheduler.StepLR
    with managed(tmp_path, first.chk, chk_freq=1) as manager:
        for update in (manager.weight_update, first.optimizer.step):
            first.backward()
            before = manager.update_attempts
            update()
            first.optimizer.zero_grad()
            first.scheduler.step()
            assert manager.update_attempts == before + 1
            manager.step()
    second = Prepared(2)
    with managed(tmp_path, second.chk) as manager:
        assert manager.restore()
        for name in ("model", "optimizer", "scheduler"):
            found, wanted = (getattr(one, name).state_dict() for one in (second, first))
            assert repr(found) == repr(wanted)


@pytest.mark.parametrize("which", ["the wrapper", "what is inside", "its name", "nothing"])
def test_an_update_goes_through_the_wrapper_which_may_leave_it_out(
    which: str, tmp_path: Path
) -> None:
    prepared = Prepared(1, accumulate=2)
    chosen = {
        "the wrapper": prepared.optimizer,
        "what is inside": prepared.optimizer.optimizer,
        "its name": "optimizer",
        "nothing": None,
    }[which]
    with managed(tmp_path, prepared.chk) as manager:
        for attempts in (0, 1):
            with prepared.accelerator.accumulate(prepared.model):
                prepared.backward()
                manager.weight_update(chosen)
                prepared.optimizer.zero_grad()
            assert manager.update_attempts == attempts


class LookAhead(torch.optim.Optimizer):
    """Shaped like the common ones: state of its own, and no call of the base class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def state_dict(self) -> dict[str, Any]:
        return {**self.optimizer.state_dict(), "slow_state": {}}


def test_a_wrapper_with_state_of_its_own_is_refused_with_its_name() -> None:
    inner = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(StateError, match=r"optimizer=\.\.\.\): .*LookAhead is a torch Opt"):
        CFCheckpoint(optimizer=LookAhead(inner))
