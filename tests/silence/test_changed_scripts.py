"""Scripts that change what a restore brings back, on their way or between two starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import checkfreq
from checkfreq import CFCheckpoint, CFManager
from checkfreq.errors import ConfigError
from iterators import CFIterator
from tests.silence.training import EVERY, data, digest, learning, loss_of, tick, tried

# ---- ``requires_grad`` and ``training`` flags are restored with their module; a change is said


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


def train_with_flags(
    directory: str,
    kill: int,
    *,
    begin: Callable[[Any, int], Any],
    end: Callable[[Any], Any] = lambda model: None,
    frozen: bool = False,
) -> str:
    """Three epochs of eight updates; ``begin`` is called as an epoch is entered or resumed."""
    loader, model = data(), net()
    model.get_submodule("0").requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    update = learning(model, optimizer)
    with CFManager(directory, CFCheckpoint(model=model, opt=optimizer), **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        manager.restore()
        for epoch in batches.epochs(3):
            begin(model, epoch)
            for batch in batches:
                tick(manager, manager.global_step + 1 == kill)
                update(manager, batch)
            end(model)
            if manager.global_step + 1 == kill:
                manager.step()
                tick(manager, kill=True)
    return digest(model)


def thaw_in_epoch_1(model: Any, epoch: int) -> None:
    if epoch == 1:
        model[0].requires_grad_(True)
        model[1].eval()


def thaws(directory: str, kill: int) -> str:
    return train_with_flags(directory, kill, begin=thaw_in_epoch_1, frozen=True)


def forgets_to_train_again(directory: str, kill: int) -> str:
    return train_with_flags(directory, kill, begin=lambda m, _: None, end=lambda m: m.eval())


@pytest.mark.parametrize(
    ("program", "kills"),
    [(thaws, (12, 20)), (forgets_to_train_again, (17,))],
)
def test_what_a_script_sets_on_its_way_is_exact_and_no_warning(
    program: Any, kills: tuple[int, ...], tmp_path: Path
) -> None:
    trial = tried(program, tmp_path, kills=kills)
    assert trial.is_exact
    assert not trial.warnings


def saved(folder: Path, model: nn.Module) -> None:
    with CFManager(folder, CFCheckpoint(model=model), **EVERY) as manager:
        manager.save(wait=True)


def test_load_into_a_live_module_leaves_its_flags(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, net().eval())
    model = net().requires_grad_(False)
    checkfreq.load(tmp_path, into={"model": model})
    assert model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert "flags" not in caplog.text


def test_a_script_that_was_changed_is_told_by_as_few_names_as_possible(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def resumed(change: Callable[[nn.Sequential], Any]) -> nn.Sequential:
        model: nn.Sequential = change(net())
        with CFManager(tmp_path, CFCheckpoint(model=model), **EVERY) as manager:
            manager.restore()
            model[0].eval()  # on its way
            manager.save(wait=True)
        return model

    saved(tmp_path, net())
    resumed(lambda model: model)
    resumed(lambda model: model)  # the first start counts, not the latest
    assert "flags" not in caplog.text
    changed = resumed(lambda model: model.requires_grad_(False))
    assert all(parameter.requires_grad for parameter in changed.parameters())
    assert "to change them): model: requires_grad False -> True" in caplog.text
    caplog.clear()
    changed = resumed(lambda model: model[3].eval() and model)
    assert changed[3].training
    assert "to change them): model.3: training False -> True" in caplog.text


# ---- plans that are changed at a resume: said by name, and kept where the script asks for it


Scheduler = Callable[[torch.optim.Optimizer, int], Any]


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps + 1)


def warm_up(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    rest = lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    return lr_scheduler.SequentialLR(optimizer, [first, rest], [4])


def trained_up_to(
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
        (one_cycle, ("sch.total_steps", "sch._schedule_phases")),
        (warm_up, ("sch.T_max",)),
    ],
)
def test_a_horizon_that_was_changed_is_named_and_can_be_kept(
    make: Scheduler, entries: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained_up_to(tmp_path, 1, make, planned=3)
    trained_up_to(tmp_path, 2, make, planned=3)  # a rate that only its schedule changed
    assert not warnings(caplog)
    trained_up_to(tmp_path, 2, make, planned=6)
    (said,) = warnings(caplog)
    assert all(entry.split(".")[1] in said for entry in entries)
    assert f"restore(keep={entries!r})" in said
    trained_up_to(tmp_path, 3, make, planned=6, keep=entries)
    assert not warnings(caplog)
    scheduler = trained_up_to(tmp_path, 3, make, planned=6)  # what was kept is the run's plan now
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
    def half_way(optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return lr_scheduler.MultiStepLR(optimizer, [steps // 2])

    trained_up_to(tmp_path, 1, half_way, planned=9)
    for epochs in (2, 3):
        scheduler = trained_up_to(tmp_path, epochs, half_way, planned=9, lr=0.5)
        (said,) = warnings(caplog)
        assert "opt.lr: 0.05 at the first start, 0.5 now" in said
        assert scheduler.optimizer.param_groups[0]["lr"] == 0.05
    scheduler = trained_up_to(tmp_path, 4, half_way, planned=9, lr=0.5, keep=("opt.lr",))
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
    trained_up_to(tmp_path, 1, cosine, planned=3)
    for name, found in (
        ("sch.Tmax", "expected some of .*sch.T_max"),
        ("model.weight", "expected names such as"),
        ("opt", "left as it is by exclude"),
        ("opt.params", "expected some of .*opt.lr"),
    ):
        with pytest.raises(ConfigError, match=found):
            trained_up_to(tmp_path, 2, cosine, planned=6, keep=(name,))


# ---- a group that is added in the course of training: ``peek()`` tells before the objects are made


def thaw(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.01})


def add_group(directory: str, kill: int) -> str:
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
    trial = tried(add_group, tmp_path, kills=(6, 9, 13))
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
