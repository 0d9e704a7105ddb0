"""Plans that are changed at a resume: said by name, and kept where the script asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from checkfreq import CFCheckpoint, CFManager
from checkfreq.errors import ConfigError
from iterators import CFIterator
from tests.silence.training import EVERY, data, loss_of

Scheduler = Callable[[torch.optim.Optimizer, int], Any]


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def milestones(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return lr_scheduler.MultiStepLR(optimizer, [steps // 2, steps * 3 // 4])


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps + 1)


def warm_up(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    rest = lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    return lr_scheduler.SequentialLR(optimizer, [first, rest], [4])


def trained(
    directory: Path,
    epochs: int,
    make: Scheduler,
    *,
    keep: tuple[str, ...] = (),
    planned: int | None = None,
    lr: float = 0.05,
) -> Any:
    """Train up to ``epochs``, as planned for ``planned`` of them; returns the scheduler."""
    loader = data()
    model = nn.Linear(8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = make(optimizer, 8 * (planned or epochs))
    chk = CFCheckpoint(model=model, opt=optimizer, sch=scheduler)
    with CFManager(directory, chk, **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        manager.restore(keep=keep)
        for _ in batches.epochs(epochs):
            for x, y in batches:
                loss_of(model, x, y).backward()
                manager.weight_update()
                optimizer.zero_grad()
                scheduler.step()
    return scheduler


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged at WARNING since the last call."""
    found = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    caplog.clear()
    return found


@pytest.mark.parametrize(
    ("make", "entries"),
    [
        (cosine, ("sch.T_max",)),
        (milestones, ("sch.milestones",)),
        (one_cycle, ("sch.total_steps", "sch._schedule_phases")),
        (warm_up, ("sch.T_max",)),
    ],
)
def test_a_horizon_that_was_changed_is_named_and_can_be_kept(
    make: Scheduler, entries: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, 1, make, planned=3)
    trained(tmp_path, 2, make, planned=3)  # a rate that only its schedule changed
    assert not warnings(caplog)
    trained(tmp_path, 2, make, planned=6)
    (said,) = warnings(caplog)
    assert all(entry.split(".")[1] in said for entry in entries)
    assert f"restore(keep={entries!r})" in said
    trained(tmp_path, 2, make, planned=6, keep=entries)
    assert not warnings(caplog)
    scheduler = trained(tmp_path, 3, make, planned=6)  # what was kept is the run's plan now
    assert not warnings(caplog)
    fresh = make(torch.optim.AdamW(nn.Linear(8, 3).parameters(), lr=0.05), 48).state_dict()
    loaded = scheduler.state_dict()
    if make is warm_up:
        fresh, loaded = fresh["_schedulers"][1], loaded["_schedulers"][1]
    for entry in entries:
        assert loaded[entry.split(".")[1]] == fresh[entry.split(".")[1]]


def test_a_rate_that_the_script_changed_is_named_at_each_resume_until_it_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, 1, milestones, planned=9)
    for epochs in (2, 3):
        scheduler = trained(tmp_path, epochs, milestones, planned=9, lr=0.5)
        (said,) = warnings(caplog)
        assert "opt.lr: 0.05 at the first start, 0.5 now" in said
        assert scheduler.optimizer.param_groups[0]["lr"] == 0.05
    scheduler = trained(tmp_path, 4, milestones, planned=9, lr=0.5, keep=("opt.lr",))
    assert "opt.lr" not in "".join(warnings(caplog))
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.5


def test_a_tensor_of_a_rate_and_one_of_several_groups_are_compared_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def optimizer_of(model: nn.Linear, rate: float) -> torch.optim.Optimizer:
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(rate)}]
        return torch.optim.AdamW(groups, lr=torch.tensor(0.05), foreach=False)

    def resumed(rate: float, keep: tuple[str, ...] = ()) -> Any:
        model = nn.Linear(8, 3)
        optimizer = optimizer_of(model, rate)
        with CFManager(tmp_path, CFCheckpoint(model=model, opt=optimizer), **EVERY) as manager:
            manager.restore(keep=keep)
            model(torch.ones(1, 8)).sum().backward()
            manager.weight_update()
            manager.step()
        return optimizer.param_groups[1]["lr"]

    assert resumed(0.25) == 0.25
    assert not warnings(caplog)
    assert resumed(0.5) == 0.25
    assert "opt[1].lr: 0.25 at the first start, 0.5 now" in "".join(warnings(caplog))
    kept = resumed(0.5, ("opt.lr",))
    assert isinstance(kept, torch.Tensor)
    assert kept == 0.5
    assert not warnings(caplog)


class Plain(torch.optim.SGD):
    """An optimizer whose state dict is not of torch's form."""

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.param_groups[0]["lr"], "seen": torch.ones(2)}

    def load_state_dict(self, state_dict: Any) -> None:
        self.param_groups[0]["lr"] = state_dict["rate"]


def test_entries_of_a_state_dict_of_an_optimizers_own_form_are_kept(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(1))
    saved, live = Plain([weight], lr=0.1), Plain([weight], lr=0.2)
    with CFManager(tmp_path, CFCheckpoint(opt=saved), **EVERY) as manager:
        manager.save(wait=True)
    with CFManager(tmp_path, CFCheckpoint(opt=live), **EVERY) as manager:
        for name, found in (("lr", "expected some of opt.rate"), ("seen", "holds tensors")):
            with pytest.raises(ConfigError, match=found):
                manager.restore(keep=(f"opt.{name}",))
        manager.restore(keep=("opt.rate",))
        assert live.param_groups[0]["lr"] == 0.2
        manager.restore()
        assert live.param_groups[0]["lr"] == 0.1


def test_a_name_that_is_no_entry_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    trained(tmp_path, 1, cosine, planned=3)
    for name, found in (
        ("sch.Tmax", "expected some of .*sch.T_max"),
        ("model.weight", "expected names such as"),
        ("opt", "left as it is by exclude"),
        ("opt.params", "expected some of .*opt.lr"),
    ):
        with pytest.raises(ConfigError, match=found):
            trained(tmp_path, 2, cosine, planned=6, keep=(name,))
