"""Interrupted equals uninterrupted, bit for bit, for every kind of training state.

Each case trains a few steps, is captured, goes on; a second instance, built from another seed
and trained for a different number of steps, is restored and goes on too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from checkfreq.state.checkpoint import CFCheckpoint
from tests.state.support import plan, restore, state_bits, take


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
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "LBFGS wolfe": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
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
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 4, 4]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lrs.LinearLR(o),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CyclicLR custom": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=2, scale_fn=Decay()),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=50),
    "LambdaLR": lambda o: lrs.LambdaLR(o, Decay()),
    "LambdaLR function": lambda o: lrs.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, Decay()),
    "SWALR": lambda o: SWALR(o, 0.01, anneal_epochs=4),
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
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

        return Run(step, model=model, optimizer=optimizer, scheduler=scheduler)

    check(run)
    check(run, stray=0)


def test_plateau_scheduler_that_never_stepped_holds_infinity() -> None:
    def run() -> Run:
        model = small_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = lrs.ReduceLROnPlateau(optimizer, patience=0)

        def step() -> None:
            scheduler.step(backward(model).detach().item())
            optimizer.step()

        return Run(step, model=model, optimizer=optimizer, scheduler=scheduler)

    check(run, before=0)
    check(run)


def test_averaged_model_continues() -> None:
    def run() -> Run:
        model = small_net()
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            backward(model)
            optimizer.step()
            ema.update_parameters(model)  # type: ignore[no-untyped-call]

        return Run(step, model=model, ema=ema, optimizer=optimizer)

    check(run)


def with_adamw(model: nn.Module, forward: Callable[[], Tensor]) -> Run:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        forward().abs().square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Run(step, model=model, optimizer=optimizer)


def test_channels_last_model_continues_and_stays_channels_last() -> None:
    def run() -> Run:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return with_adamw(model, lambda: model(torch.randn(2, 3, 5, 5)))

    check(run)
    trained, fresh = run(), run()
    trained.step()
    restore(fresh.chk, take(trained.chk))
    weight = fresh.chk.tracked["model"][0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert fresh.chk.optimizers["optimizer"].state[weight]["exp_avg"].stride() == weight.stride()


def test_a_checkpoint_moves_between_compiled_and_bare_models() -> None:
    bare = small_net()
    wrapped = torch.compile(small_net(), backend="eager")
    restore(CFCheckpoint(model=wrapped), take(CFCheckpoint(model=bare)))
    inner = wrapped._orig_mod  # type: ignore[attr-defined]
    assert state_bits(CFCheckpoint(model=inner)) == state_bits(CFCheckpoint(model=bare))
    other = small_net()
    restore(CFCheckpoint(model=other), take(CFCheckpoint(model=wrapped)))
    assert state_bits(CFCheckpoint(model=other)) == state_bits(CFCheckpoint(model=bare))


def test_arrays_and_odd_tensors_in_dicts_come_back() -> None:
    original = {
        "seen": np.arange(6).reshape(2, 3).T,
        "wide": np.array([1, 2], dtype=np.uint64),
        "frozen": np.broadcast_to(np.float32(1.5), (2, 2)),
        "backwards": np.arange(4)[::-1],
        "zero": torch.tensor(2.5),
        "empty": torch.empty(0, 3, dtype=torch.int16),
        "conj": torch.tensor([1 + 2j]).conj(),
        "nested": {"list": [torch.ones(2), (np.float32(3), None)]},
        "shape": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "format": torch.channels_last,
    }
    live: dict[str, Any] = {"stale": 1}
    restore(CFCheckpoint(d=live), take(CFCheckpoint(d=original)))
    assert list(live) == list(original)
    for key in ("seen", "wide", "frozen", "backwards"):
        np.testing.assert_array_equal(live[key], original[key])
        assert live[key].dtype == original[key].dtype  # type: ignore[attr-defined]
        assert live[key].flags.writeable
    assert live["seen"].flags.f_contiguous
    assert state_bits(CFCheckpoint(d={"z": live["zero"], "e": live["empty"]})) == state_bits(
        CFCheckpoint(d={"z": original["zero"], "e": original["empty"]})
    )
    assert torch.equal(live["conj"], original["conj"])  # type: ignore[arg-type]
    assert torch.equal(live["nested"]["list"][0], torch.ones(2))
    assert type(live["nested"]["list"][1][0]) is np.float32
    for key in ("shape", "dtype", "device", "format"):
        assert live[key] == original[key]
        assert type(live[key]) is type(original[key])


def test_random_generators_continue_where_they_stopped_once_they_are_applied() -> None:
    def draw() -> list[float]:
        values = [random.gauss(0, 1), random.random(), float(np.random.randn())]
        return [*values, float(torch.randn(())), *torch.rand(3).tolist()]

    draw()
    shot = take(CFCheckpoint())
    expected = draw()
    restored = plan(CFCheckpoint(), shot)
    restored.apply()
    shot.overwrite()
    assert draw() != expected
    restored.apply_rng()
    assert draw() == expected
