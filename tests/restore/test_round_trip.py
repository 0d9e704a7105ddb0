"""Interrupted equals uninterrupted, bit for bit, for every kind of training state.

Each case trains a few steps, is captured, goes on; a second instance, built from another seed
and trained for a different number of steps, is restored and goes on too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

from checkfreq.state.checkpoint import CFCheckpoint
from tests.state.support import restore, state_bits, take


class Run:
    """One training: the tracked objects and how to make a step with them."""

    def __init__(self, step: Callable[[], object], **tracked: Any) -> None:
        self.step = step
        self.chk = CFCheckpoint(**tracked)


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))


def backward(model: nn.Module, *shape: int) -> Tensor:
    model.zero_grad()
    loss: Tensor = model(torch.randn(*(shape or (8, 4)))).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def supervised(make_optimizer: Callable[[Any], Any]) -> Run:
    model = small_net()
    optimizer = make_optimizer(model.parameters())

    def closure() -> float:
        return float(backward(model).detach())

    return Run(lambda: optimizer.step(closure), model=model, optimizer=optimizer)


def check(make: Callable[[], Run], *, before: int = 3, after: int = 3, stray: int = 5) -> None:
    """``stray``: steps of the restored instance before it is restored."""
    torch.manual_seed(1)
    first = make()
    for _ in range(before):
        first.step()
    shot = take(first.chk)
    for _ in range(after):
        first.step()
    torch.manual_seed(2)
    second = make()
    for _ in range(stray):
        second.step()
    restore(second.chk, shot)
    for _ in range(after):
        second.step()
    assert state_bits(second.chk) == state_bits(first.chk)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizer_continues_with_the_same_bits(make: Callable[[Any], Any]) -> None:
    for before, stray in ((3, 0), (3, 5), (0, 5)):  # fresh, used, and saved before its first step
        check(lambda: supervised(make), before=before, stray=stray)


class Decay:
    """A callable object, whose attributes LambdaLR keeps."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.9 ** (epoch + 0.1 * self.calls)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "CyclicLR custom": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=2, scale_fn=Decay()),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=50),
    "LambdaLR": lambda o: lrs.LambdaLR(o, Decay()),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, Decay()),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, total_iters=2), lrs.CosineAnnealingLR(o, 10)], [2]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.LinearLR(o, total_iters=2), lrs.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)], ids=["number", "tensor"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
def test_scheduler_continues_with_the_same_bits(make: Callable[[Any], Any], lr: Any) -> None:
    def run() -> Run:
        model = small_net()
        value = lr.clone() if isinstance(lr, Tensor) else lr
        optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
        scheduler = make(optimizer)

        def step() -> None:
            loss = backward(model).item()
            optimizer.step()
            optimizer.zero_grad()
            needs_loss = isinstance(scheduler, lrs.ReduceLROnPlateau)
            scheduler.step(*[loss] if needs_loss else [])

        return Run(step, model=model, optimizer=optimizer, scheduler=scheduler)

    check(run)
    check(run, before=0)  # one that never stepped may hold infinity
    check(run, stray=0)


def test_a_checkpoint_moves_between_compiled_and_bare_models() -> None:
    bare = small_net()
    wrapped = torch.compile(small_net(), backend="eager")
    restore(CFCheckpoint(model=wrapped), take(CFCheckpoint(model=bare)))
    inner = wrapped._orig_mod  # type: ignore[attr-defined]
    assert state_bits(CFCheckpoint(model=inner)) == state_bits(CFCheckpoint(model=bare))
    other = small_net()
    restore(CFCheckpoint(model=other), take(CFCheckpoint(model=wrapped)))
    assert state_bits(CFCheckpoint(model=other)) == state_bits(CFCheckpoint(model=bare))
