"""The gate in front of every weight update."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
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


def test_each_optimizers_step_is_an_attempt(parameter: torch.nn.Parameter) -> None:
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for _ in range(2)]
    gate = UpdateGate(steps_of(*optimizers), fence=lambda: None)
    for optimizer in optimizers:
        optimizer.step()
    gate.count()
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


def test_torch_keeps_neither_the_hook_nor_the_gate(parameter: torch.nn.Parameter) -> None:
    gc.collect()  # gates of other tests
    before = len(_global_optimizer_pre_hooks)
    gate = UpdateGate(steps_of(), fence=lambda: None)
    alive = weakref.ref(gate)
    del gate
    gc.collect()
    assert alive() is None
    assert len(_global_optimizer_pre_hooks) == before


def test_a_step_that_is_no_update_waits_and_does_not_count(parameter: torch.nn.Parameter) -> None:
    optimizer, fence = torch.optim.SGD([parameter], lr=1.0), Fence(parameter)
    gate = UpdateGate(lambda one, is_first: False if one is optimizer else None, fence=fence)
    optimizer.step()
    assert fence.seen == [1.0]
    assert gate.attempts == 0
