"""``requires_grad`` and ``training`` flags are restored with their module; a change is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager
from checkfreq.state.adapters.flags import covering, is_covered
from iterators import CFIterator
from tests.silence.training import EVERY, data, digest, learning, tick, tried


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


def train(
    directory: str,
    kill: int,
    *,
    begin: Callable[[nn.Module, int], Any],
    end: Callable[[nn.Module], Any] = lambda model: None,
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
    return train(directory, kill, begin=thaw_in_epoch_1, frozen=True)


def forgets_to_train_again(directory: str, kill: int) -> str:
    return train(directory, kill, begin=lambda m, _: None, end=lambda m: m.eval())


def freezes_always(directory: str, kill: int) -> str:
    return train(directory, kill, begin=lambda m, _: m.get_submodule("1").eval(), frozen=True)


@pytest.mark.parametrize(
    ("program", "kills"),
    [(thaws, (12, 20)), (forgets_to_train_again, (17,)), (freezes_always, (11,))],
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


def test_an_evaluation_stays_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, net())
    model = net().eval()
    with CFManager(tmp_path, CFCheckpoint(model=model), **EVERY) as manager:
        manager.restore()
    assert not any(module.training for module in model.modules())
    assert "flags" not in caplog.text


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


@pytest.mark.parametrize(
    ("flagged", "others", "names"),
    [
        ((), ("a.w",), []),
        (("a.w", "b.w"), (), [""]),
        (("a.w", "a.b.w", "b.w"), ("b.c.w",), ["a", "b.w"]),
        ((".", "a."), ("b.",), [".", "a"]),
        (("a.", "a.b."), (".", "a.c."), ["a.", "a.b"]),
    ],
)
def test_names_cover_what_is_flagged_and_nothing_else(
    flagged: tuple[str, ...], others: tuple[str, ...], names: list[str]
) -> None:
    flags = {**dict.fromkeys(flagged, True), **dict.fromkeys(others, False)}
    assert covering(flags) == names
    assert all(is_covered(name, names) is flag for name, flag in flags.items())
