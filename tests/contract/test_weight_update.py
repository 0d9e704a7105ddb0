"""The contract's ``weight_update``, and the barrier in front of every optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkfreq import CFCheckpoint
from checkfreq.errors import ConfigError
from tests.contract.conftest import Gate, Hold
from tests.contract.runs import Training, managed, restored, running


class Pair:
    """Two models with an optimizer each, as in a GAN."""

    def __init__(self, scaler: torch.amp.GradScaler | None = None) -> None:
        torch.manual_seed(0)
        self.models = [nn.Linear(2, 1), nn.Linear(2, 1)]
        self.d = torch.optim.SGD(self.models[0].parameters(), lr=0.1)
        self.g = torch.optim.SGD(self.models[1].parameters(), lr=0.1)
        extra = {} if scaler is None else {"scaler": scaler}
        self.chk = CFCheckpoint(a=self.models[0], b=self.models[1], d=self.d, g=self.g, **extra)

    def backward(self, scaler: torch.amp.GradScaler | None = None) -> None:
        loss = torch.stack([model(torch.ones(1, 2)).sum() for model in self.models]).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()

    def weights(self) -> list[torch.Tensor]:
        return [model.weight.detach().clone() for model in self.models]


def cpu_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)


def changed(before: list[torch.Tensor], after: list[torch.Tensor]) -> list[bool]:
    return [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]


def open_gate_in_step(optimizer: torch.optim.Optimizer, gate: Gate) -> None:
    """Let the copy go on from inside ``step``, before the manager's hook: the latest moment."""
    optimizer.register_step_pre_hook(lambda *_: gate.open())


@pytest.mark.parametrize("by_name", [True, False])
def test_with_several_optimizers_the_one_to_step_is_named(chk_dir: Path, by_name: bool) -> None:
    pair = Pair()
    with managed(chk_dir, pair.chk) as manager:
        pair.backward()
        before = pair.weights()
        manager.weight_update("g" if by_name else pair.g)
        assert changed(before, pair.weights()) == [False, True]


REFUSED: dict[str, tuple[Callable[[torch.amp.GradScaler], dict[str, Any]], str]] = {
    "none of several named": (lambda scaler: {}, "the name of one, found: d, g"),
    "a name of nothing": (lambda scaler: {"optimizer": "x"}, "not tracked; tracked: d, g"),
    "untracked": (
        lambda scaler: {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
        "not tracked; tracked: d, g",
    ),
    "untracked scaler": (lambda scaler: {"scaler": cpu_scaler()}, r"CFCheckpoint\(scaler=\.\.\.\)"),
    "scaler and closure": (lambda scaler: {"scaler": scaler, "closure": lambda: None}, "closure"),
}


@pytest.mark.parametrize(("arguments", "found"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_call_has_stepped_nothing_and_counts_as_no_update(
    arguments: Callable[[torch.amp.GradScaler], dict[str, Any]], found: str, chk_dir: Path
) -> None:
    scaler = cpu_scaler()
    pair = Pair(None if found.startswith("CF") else scaler)
    with managed(chk_dir, pair.chk) as manager:
        pair.backward()
        before = pair.weights()
        with pytest.raises(ConfigError, match=found):
            manager.weight_update(**arguments(scaler))
        assert changed(before, pair.weights()) == [False, False]
        assert manager.update_attempts == 0


def test_with_a_scaler_each_of_several_optimizers_is_stepped_or_the_one_that_is_named(
    chk_dir: Path,
) -> None:
    scaler = cpu_scaler()
    pair = Pair(scaler)
    with managed(chk_dir, pair.chk) as manager:
        pair.backward(scaler)
        before = pair.weights()
        manager.weight_update(scaler=scaler)
        assert changed(before, pair.weights()) == [True, True]
        assert scaler.get_scale() == 16.0  # updated once
        pair.backward(scaler)
        before = pair.weights()
        manager.weight_update("d", scaler=scaler)
        assert changed(before, pair.weights()) == [True, False]


def test_an_amp_skip_counts_as_an_attempt(chk_dir: Path) -> None:
    scaler = cpu_scaler()
    training = Training(scaler=scaler)
    with managed(chk_dir, training.chk) as manager:
        training.model(torch.ones(2, 3)).sum().backward()
        scaler.scale(torch.zeros(()))
        next(training.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        before = training.state_bits()
        manager.weight_update(scaler=scaler)
        assert training.state_bits() == before
        assert manager.update_attempts == 1
        assert scaler.get_scale() == 4.0


UPDATES = {
    "weight_update": lambda training, manager: manager.weight_update(),
    "optimizer.step": lambda training, manager: training.optimizer.step(),
    "weight_update with a closure": lambda training, manager: manager.weight_update(
        closure=lambda: None
    ),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES.keys())
def test_the_update_waits_for_the_copy_so_a_direct_step_is_as_safe(
    chk_dir: Path, hold_trainer: Hold, update: Any
) -> None:
    gate = hold_trainer("snapshot.copy_settled")
    training = Training()
    open_gate_in_step(training.optimizer, gate)
    with managed(chk_dir, training.chk) as manager:
        training.update(manager)
        manager.step()
        bits = training.state_bits()
        manager.save()
        training.backward()
        update(training, manager)
        assert training.state_bits() != bits
    assert restored(chk_dir, 1).state_bits() == bits


def test_after_close_the_optimizer_is_free_of_hooks(chk_dir: Path) -> None:
    with running(chk_dir) as (training, manager):
        pass
    training.backward()
    training.optimizer.step()
    assert manager.update_attempts == 0
