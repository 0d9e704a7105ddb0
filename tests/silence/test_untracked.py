"""What a run needs and does not track is named; what only looks like it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR, StepLR

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from tests.silence.training import (
    EVERY,
    data,
    digest,
    killed_and_resumed,
    loss_of,
    trained,
    tried,
)

# ---- what steps tracked parameters and is not tracked is warned of; what only looks like it is not


def two_parts() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def forgot(directory: str, kill: int) -> str:
    """A second optimizer and a scaler are not tracked."""
    loader, model = data(), two_parts()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[2].parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2, init_scale=16.0)

    def update(manager: CFManager, batch: Any) -> None:
        scaler.scale(loss_of(model, *batch)).backward()
        scaler.step(optimizer)
        scaler.step(second)
        scaler.update()
        model.zero_grad()

    trained(directory, kill, loader, update, model=model, optimizer=optimizer)
    return digest(model)


def test_what_is_forgotten_is_named_in_each_start_with_what_to_write(tmp_path: Path) -> None:
    for begun in killed_and_resumed(forgot, tmp_path):
        scaler, optimizer = begun.warnings
        assert "the GradScaler 'scaler' steps an optimizer" in scaler
        assert scaler.endswith("CFCheckpoint(..., scaler=scaler)")
        assert "the Adam 'second' steps parameters that are tracked" in optimizer
        assert optimizer.endswith("CFCheckpoint(..., second=second)")


def test_an_optimizer_that_alone_updates_the_tracked_model_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No optimizer is tracked: the one that steps passes boundaries."""
    loader, model = data(), two_parts()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with CFManager(tmp_path, CFCheckpoint(model=model), **EVERY) as manager:
        for x, y in CFIterator(loader, cf_manager=manager):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
    assert manager.global_step == 8
    (warning,) = warnings(caplog)
    assert "CFCheckpoint(..., optimizer=optimizer)" in warning


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno > 20]


class Run:
    """A model of two parts and its optimizer, with a manager that never checkpoints by itself."""

    def __init__(self, directory: Path, **tracked: Any) -> None:
        self.model = two_parts()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.directory, self.tracked = directory, tracked

    def iterate(self, update: Callable[[], Any], *, num: int = 3) -> None:
        chk = CFCheckpoint(model=self.model, optimizer=self.optimizer, **self.tracked)
        with CFManager(self.directory, chk, **{**EVERY, "chk_freq": 0}) as manager:
            for _ in range(num):
                self.model(torch.ones(2, 8)).sum().backward()
                update()
                self.optimizer.zero_grad()
                manager.step()


Schedule = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: dict[str, Schedule] = {
    "StepLR": lambda optimizer: StepLR(optimizer, 1),
    "on a plateau": ReduceLROnPlateau,
}


def advance(scheduler: Any) -> None:
    scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_schedule_of_a_tracked_optimizer_is_named_once_when_it_goes_on(
    make: Schedule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    cosine = make(run.optimizer)

    def update() -> None:
        run.optimizer.step()
        advance(cosine)

    run.iterate(update, num=4)
    (text,) = warnings(caplog)
    assert "'cosine' schedules a tracked optimizer" in text
    assert text.endswith("CFCheckpoint(..., cosine=cosine)")


def quiet_schedule(run: Run) -> Callable[[], Any]:
    """A tracked scheduler of schedulers, and one that was for the warm-up before."""
    parts: list[LRScheduler] = [LinearLR(run.optimizer), StepLR(run.optimizer, 1)]
    whole = SequentialLR(run.optimizer, parts, milestones=[1])
    run.tracked["scheduler"] = whole
    warm_up = StepLR(run.optimizer, 1)

    def update() -> None:
        assert warm_up is not None
        run.optimizer.step()
        whole.step()

    return update


def quiet_stranger(run: Run) -> Callable[[], Any]:
    """An optimizer of a module that nobody tracks, with a scaler of its own."""
    other = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(other.parameters())
    scaler = torch.amp.GradScaler("cpu")

    def update() -> None:
        run.optimizer.step()
        scaler.scale(other(torch.ones(1, 8)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    return update


def quiet_inner_loop(run: Run) -> Callable[[], Any]:
    """An optimizer that lives for one iteration, as in meta-learning."""

    def update() -> None:
        inner = torch.optim.Adam(run.model.parameters())
        inner.step()
        run.optimizer.step()

    return update


def quiet_scalers(run: Run) -> Callable[[], Any]:
    """A scaler that is switched off."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return lambda: scaler.step(run.optimizer)


class Kept:
    """State of the script, with everything in it."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def quiet_keeper(run: Run) -> Callable[[], Any]:
    """An object that saves an optimizer, a schedule and a scaler."""
    optimizer = torch.optim.Adam(run.model[2].parameters())
    schedule, scaler = StepLR(run.optimizer, 1), torch.amp.GradScaler("cpu")
    run.tracked["kept"] = Kept(optimizer=optimizer, schedule=schedule, scaler=scaler)

    def update() -> None:
        scaler.scale(run.model(torch.ones(1, 8)).sum()).backward()
        scaler.step(run.optimizer)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()

    return update


class Around(torch.optim.Optimizer):
    """A wrapper that passes on everything."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


QUIET = (quiet_schedule, quiet_stranger, quiet_inner_loop)
QUIET = (*QUIET, quiet_scalers, quiet_keeper, lambda run: Around(run.optimizer).step)


@pytest.mark.parametrize("script", QUIET)
def test_what_loses_nothing_is_not_named(
    script: Callable[[Run], Callable[[], Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.iterate(script(run))
    assert warnings(caplog) == []


# ---- what a tracked optimizer steps and no tracked object holds is saved with it, and named once


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


def test_what_the_optimizer_steps_is_exact_and_named_once_in_each_start(tmp_path: Path) -> None:
    trial = tried(log_alpha, tmp_path)
    assert trial.is_exact
    for begun in (trial.whole, *trial.killed, trial.resumed):
        (text,) = begun.warnings
        assert "opt steps parameters that no tracked object holds: log_alpha (parameter 2, " in text
        assert 'CFCheckpoint(..., log_alpha={"log_alpha": log_alpha})' in text
