"""The gate in front of every weight update."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from checkfreq.errors import StateError
from checkfreq.snapshot.gate import UpdateGate
from tests.snapshot.conftest import steps_of


class Fence:
    """Notes what the parameter was each time it was asked to wait."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        self.seen: list[float] = []

    def __call__(self) -> None:
        self.seen.append(self._parameter.item())


@pytest.fixture
def parameter() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.tensor(1.0))
    parameter.grad = torch.tensor(1.0)
    return parameter


def test_a_step_comes_after_the_fence_and_counts_once(parameter: torch.nn.Parameter) -> None:
    optimizer, fence = torch.optim.SGD([parameter], lr=1.0), Fence(parameter)
    gate = UpdateGate(steps_of(optimizer), fence=fence)
    assert gate.at_boundary
    optimizer.step()
    assert fence.seen == [1.0]
    assert parameter.item() == 0.0
    assert gate.attempts == 1
    assert not gate.at_boundary
    gate.pass_boundary()
    assert gate.at_boundary


def test_a_fence_that_raises_keeps_the_update_out(parameter: torch.nn.Parameter) -> None:
    def refuse() -> None:
        raise StateError("no")

    optimizer = torch.optim.SGD([parameter], lr=1.0)
    gate = UpdateGate(steps_of(optimizer), fence=refuse)
    with pytest.raises(StateError):
        optimizer.step()
    assert parameter.item() == 1.0
    assert gate.attempts == 0


def test_each_optimizers_step_is_an_attempt_if_it_is_an_update(
    parameter: torch.nn.Parameter,
) -> None:
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for _ in range(3)]
    fence = Fence(parameter)
    gate = UpdateGate(lambda one, is_first: one is not optimizers[0], fence=fence)
    for optimizer in optimizers:
        optimizer.step()
    gate.count()
    assert fence.seen == [1.0, 0.0, -1.0]
    assert gate.attempts == 3


def test_updating_waits_first_and_counts(parameter: torch.nn.Parameter) -> None:
    fence = Fence(parameter)
    gate = UpdateGate(steps_of(), fence=fence)
    with gate.updating(), torch.no_grad():
        parameter.fill_(5.0)
    assert fence.seen == [1.0]
    assert gate.attempts == 1


def test_replays_of_a_captured_step_need_updating(
    parameter: torch.nn.Parameter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch says that a graph is being captured: the hook waits for nothing and remembers."""
    optimizer, fence = torch.optim.SGD([parameter], lr=1.0), Fence(parameter)
    gate = UpdateGate(steps_of(optimizer), fence=fence)
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_initialized", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        optimizer.step()
    assert fence.seen == []
    assert gate.attempts == 0
    with pytest.raises(StateError, match=r"with cf_manager\.updating\(\): graph\.replay\(\)"):
        gate.pass_boundary()
    with gate.updating():
        pass
    gate.pass_boundary()
    with pytest.raises(StateError):
        gate.pass_boundary()


def test_close_removes_the_hook_and_is_idempotent(parameter: torch.nn.Parameter) -> None:
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    gate = UpdateGate(steps_of(optimizer), fence=lambda: None)
    gate.close()
    gate.close()
    optimizer.step()
    assert gate.attempts == 0


def test_torch_keeps_neither_the_hook_nor_the_gate() -> None:
    before = {*_global_optimizer_pre_hooks}
    gate = UpdateGate(steps_of(), fence=lambda: None)
    alive = weakref.ref(gate)
    del gate
    gc.collect()
    assert alive() is None
    assert {*_global_optimizer_pre_hooks} <= before


# ---- step(closure), which runs forward and backward itself


class WritesFirst(torch.optim.SGD):
    """Perturbs the weights, then calls the closure, as SAM does."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        return closure()


def order_of(
    kind: type[torch.optim.Optimizer], call: Callable[[Any, Callable[[], Tensor]], Any]
) -> tuple[list[str], UpdateGate]:
    """What happens in one step, in order; weights must be as they were at each fence."""
    weight = torch.nn.Parameter(torch.ones(3))
    before, events = weight.detach().clone(), list[str]()
    optimizer = kind([weight], lr=0.1)  # type: ignore[call-arg]

    def fence() -> None:
        if "fence" not in events:
            assert torch.equal(weight, before)
        events.append("fence")

    def closure() -> Tensor:
        events.append("closure")
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    gate = UpdateGate(steps_of(optimizer), fence=fence)
    assert call(optimizer, closure) is not None
    assert not torch.equal(weight, before)
    return events, gate


@pytest.mark.parametrize(
    "call",
    [
        lambda optimizer, run: optimizer.step(run),
        lambda optimizer, run: optimizer.step(closure=run),
    ],
    ids=["by position", "by name"],
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adafactor])
def test_an_update_with_a_closure_waits_after_its_backward_pass(
    kind: type[torch.optim.Optimizer], call: Callable[[Any, Callable[[], Tensor]], Any]
) -> None:
    events, gate = order_of(kind, call)
    assert events == ["closure", "fence"]
    assert gate.attempts == 1


def test_an_optimizer_that_calls_its_closure_often_waits_before_its_first_write() -> None:
    events, gate = order_of(torch.optim.LBFGS, lambda optimizer, run: optimizer.step(run))
    assert events[:2] == ["closure", "fence"]
    assert events.count("closure") > 1
    assert gate.attempts == 1


def test_an_optimizer_that_is_not_torch_s_waits_before_its_closure() -> None:
    events, gate = order_of(WritesFirst, lambda optimizer, run: optimizer.step(run))
    assert events == ["fence", "closure"]
    assert gate.attempts == 1
