"""Optimizer state that shares memory shares it again after a restore, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager
from checkfreq.errors import StateError
from checkfreq.state.capture import capture
from tests.silence.training import EVERY, data, digest, learning, trained, tried

State = dict[str, Any]


class Shared(torch.optim.Optimizer):
    """Two moments that are views of one buffer, which is state too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            s = self.state[p]
            if not s:
                s["both"] = torch.zeros(2, *p.shape)
                s["first"], s["second"] = s["both"][0], s["both"][1]
            s["first"].mul_(0.9).add_(p.grad)
            s["both"].mul_(0.99)
            p.sub_(s["both"].sum(0), alpha=0.05)
            s["second"].add_(s["first"], alpha=0.1)


def train(directory: str, kill: int) -> str:
    model = nn.Linear(8, 3)
    optimizer = Shared(model.parameters())
    trained(directory, kill, data(), learning(model, optimizer), model=model, opt=optimizer)
    return digest(model)


def test_views(tmp_path: Path) -> None:
    trial = tried(train, tmp_path)
    assert trial.is_exact
    assert not trial.warnings


def optimizer_of(make: Callable[[Tensor], State] | None, fill: float = 0.0) -> torch.optim.SGD:
    weight = nn.Parameter(torch.full((6, 4), fill))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    if make is not None:
        optimizer.state[weight] = make(weight.data)
    return optimizer


def state_of(optimizer: torch.optim.Optimizer) -> State:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]


def saved_and_restored(folder: Path, saved: Any, live: Any) -> Any:
    with CFManager(folder, CFCheckpoint(opt=saved, rng=False), **EVERY) as manager:
        manager.save(wait=True)
    with CFManager(folder, CFCheckpoint(opt=live, rng=False), **EVERY) as manager:
        assert manager.restore()
    return live


def tensors_of(state: State) -> list[Tensor]:
    found = []
    for value in state.values():
        found += value if isinstance(value, list) else [value]
    return found


def assert_shared_alike(*states: State) -> None:
    """Same values and strides, and a write to a tensor shows in the same others of each state."""
    rows = list(zip(*map(tensors_of, states), strict=True))
    for tensors in rows:
        assert len({tensor.stride() for tensor in tensors}) == 1
    for number, written in enumerate(rows, 1):
        for tensor in written:
            tensor[(0,) * tensor.dim()].fill_(number)
        for first, *others in rows:
            assert all(torch.equal(first, other) for other in others)


def halves(weight: Tensor) -> State:
    both = torch.randn(2, 6, 4)
    return {"both": both, "first": both[0], "second": both[1].t()}


def overlapping(weight: Tensor) -> State:
    line = torch.randn(10)
    return {"windows": line.unfold(0, 4, 2), "ends": [line[:6], line[3:]]}


def bits(weight: Tensor) -> State:
    line = torch.randn(6)
    return {"line": line, "table": line.view(2, 3), "integers": line.view(torch.int32)}


def conjugates(weight: Tensor) -> State:
    numbers = torch.randn(4, dtype=torch.cfloat)
    return {"numbers": numbers, "conjugates": numbers[1:].conj()}


def columns(weight: Tensor) -> State:
    table = torch.randn(6, 2)
    return {"left": table[:, 0], "right": table[:, 1]}


def of_the_parameter(weight: Tensor) -> State:
    return {"same": weight, "turned": weight.t(), "rows": weight[2:4], "first": weight[:2]}


@pytest.mark.parametrize("make", [halves, overlapping, bits, columns, conjugates])
def test_memory_that_is_shared_is_shared_again(make: Any, tmp_path: Path) -> None:
    saved = optimizer_of(make)
    live = saved_and_restored(tmp_path, saved, optimizer_of(None))
    loaded = checkfreq.load(tmp_path)["opt"]["state"][0]
    assert_shared_alike(state_of(saved), state_of(live), loaded)


def test_live_state_that_shares_memory_in_the_same_way_stays_where_it_is(tmp_path: Path) -> None:
    saved, live = optimizer_of(halves), optimizer_of(halves)
    before = dict(state_of(live))
    saved_and_restored(tmp_path, saved, live)
    assert all(tensor is before[name] for name, tensor in state_of(live).items())
    assert_shared_alike(state_of(saved), before)


def test_live_state_that_does_not_share_it_is_made_anew(tmp_path: Path) -> None:
    def apart(weight: Tensor) -> State:
        return {name: tensor.clone() for name, tensor in halves(weight).items()}

    saved = optimizer_of(halves)
    live = saved_and_restored(tmp_path, saved, optimizer_of(apart))
    assert_shared_alike(state_of(saved), state_of(live))


def test_a_view_of_the_parameter_is_one_again(tmp_path: Path) -> None:
    saved = optimizer_of(of_the_parameter, 1.0)
    live = saved_and_restored(tmp_path, saved, optimizer_of(None, 1.0))
    weight = live.param_groups[0]["params"][0]
    with torch.no_grad():
        weight.copy_(torch.arange(24.0).view(6, 4))
    assert torch.equal(state_of(live)["same"], weight)
    assert torch.equal(state_of(live)["turned"], weight.t())
    assert torch.equal(state_of(live)["rows"], weight[2:4])
    assert torch.equal(state_of(live)["first"], weight[:2])


def test_state_that_shares_memory_beside_a_parameter_that_only_the_optimizer_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def both(weight: Tensor) -> State:
        return {**halves(weight), "same": weight}

    saved = optimizer_of(both, 3.0)
    live = saved_and_restored(tmp_path, saved, optimizer_of(None, 1.0))
    weight = live.param_groups[0]["params"][0]
    assert torch.equal(weight, torch.full((6, 4), 3.0))
    assert "steps parameters that no tracked object holds" in caplog.text
    weight.data.fill_(5.0)
    assert torch.equal(state_of(live).pop("same"), weight)
    state_of(saved).pop("same")
    assert_shared_alike(state_of(saved), state_of(live))


def test_what_shares_memory_is_kept_in_the_order_of_its_owners_wherever_it_lies() -> None:
    weights, both = [nn.Parameter(torch.ones(2)) for _ in range(2)], torch.zeros(4, 2)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for weight, half in zip(weights, (both[2:], both[:2]), strict=True):  # the first lies behind
        optimizer.state[weight] = {"all": half, "row": half[1]}
    captured = capture(CFCheckpoint(opt=optimizer, rng=False))
    assert [key.partition(".all")[0] for _, key, *_ in captured.tensors[:2]] == [
        "state.0",
        "state.1",
    ]


def test_a_tracked_dict_shares_its_memory_again(tmp_path: Path) -> None:
    saved, live = halves(torch.empty(0)), {}
    saved_and_restored(tmp_path, saved, live)
    assert_shared_alike(saved, live)


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: {"bits": weight.view(torch.int32)},
        lambda weight: {"all": (c := torch.randn(4, dtype=torch.cfloat)), "neg": c.conj().imag},
    ],
)
def test_what_cannot_be_shared_again_is_refused_by_name(make: Any, tmp_path: Path) -> None:
    checkpoint = CFCheckpoint(opt=optimizer_of(make), rng=False)
    refusal = pytest.raises(StateError, match=r"opt\.state\.0\.\w+ and .* share memory")
    with CFManager(tmp_path, checkpoint, **EVERY) as manager, refusal:
        manager.save(wait=True)


def test_an_optimizer_that_loads_in_its_own_way_is_refused_by_name(tmp_path: Path) -> None:
    optimizer = optimizer_of(halves)
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: None)
    checkpoint = CFCheckpoint(opt=optimizer, rng=False)
    refusal = pytest.raises(StateError, match=r"opt: state\.0\.\w+ shares memory")
    with CFManager(tmp_path, checkpoint, **EVERY) as manager, refusal:
        manager.save(wait=True)
