"""The gate in front of every weight update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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


def test_a_step_that_is_an_update_and_a_block_come_after_the_fence_and_count_once(
    parameter: torch.nn.Parameter,
) -> None:
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for _ in range(3)]
    fence = Fence(parameter)
    gate = UpdateGate(lambda one, is_first: one is not optimizers[0], fence=fence)
    assert gate.at_boundary
    for optimizer in optimizers:
        optimizer.step()
    assert not gate.at_boundary
    gate.pass_boundary()
    assert gate.at_boundary
    with gate.updating(), torch.no_grad():
        parameter.fill_(5.0)
    gate.count()
    assert fence.seen == [1.0, 0.0, -1.0, -2.0]
    assert gate.attempts == 4


def test_a_fence_that_raises_keeps_the_update_out(parameter: torch.nn.Parameter) -> None:
    def refuse() -> None:
        raise StateError("no")

    optimizer = torch.optim.SGD([parameter], lr=1.0)
    gate = UpdateGate(steps_of(optimizer), fence=refuse)
    with pytest.raises(StateError):
        optimizer.step()
    assert parameter.item() == 1.0
    assert gate.attempts == 0


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


# ---- step(closure), which runs forward and backward itself


class WritesFirst(torch.optim.SGD):
    """Perturbs the weights, then calls the closure, as SAM does."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        return closure()


CLOSURES: dict[str, tuple[type[torch.optim.Optimizer], bool, list[str]]] = {
    "by position": (torch.optim.SGD, False, ["closure", "fence"]),
    "by name": (torch.optim.SGD, True, ["closure", "fence"]),
    "called often": (torch.optim.LBFGS, False, ["closure", "fence", "closure"]),
    "not torch's": (WritesFirst, False, ["fence", "closure"]),
}


@pytest.mark.parametrize(("kind", "by_name", "expected"), CLOSURES.values(), ids=CLOSURES.keys())
def test_an_update_with_a_closure_waits_once_and_before_its_first_write(
    kind: type[torch.optim.Optimizer], by_name: bool, expected: list[str]
) -> None:
    """After the backward pass, where the optimizer is torch's."""
    weight = torch.nn.Parameter(torch.ones(3))
    before, events = weight.detach().clone(), list[str]()
    optimizer: Any = kind([weight], lr=0.1)  # type: ignore[call-arg]

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
    assert (optimizer.step(closure=closure) if by_name else optimizer.step(closure)) is not None
    assert not torch.equal(weight, before)
    assert events[:3] == expected
    assert gate.attempts == 1
