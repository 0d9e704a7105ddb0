"""Where an update waits whose step runs forward and backward itself: ``step(closure)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from checkfreq.snapshot.gate import UpdateGate
from tests.snapshot.conftest import steps_of


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
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
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
