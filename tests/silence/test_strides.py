"""Optimizer state, and other tensors that a restore makes anew, have the strides they had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager
from tests.silence.training import EVERY, data, digest, trained, tried


class Rotating(torch.optim.Optimizer):
    """Keeps eigenvectors as SOAP does: column-major, as LAPACK returns them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            size = p.shape[-1]
            state = self.state[p]
            if "Q" not in state:
                state["Q"] = torch.linalg.qr(torch.randn(size, size))[0]
            p.sub_((p.grad @ state["Q"]) @ state["Q"].t(), alpha=0.05)
            square = p.grad.t() @ p.grad + torch.eye(size)
            state["Q"].copy_(torch.linalg.qr(square @ state["Q"].contiguous())[0])


def train(directory: str, kill: int) -> Any:
    loader = data()
    torch.manual_seed(1)
    w, v = nn.Parameter(torch.randn(8, 67)), nn.Parameter(torch.randn(67, 3))
    box, optimizer = nn.ParameterList([w, v]), Rotating([w, v])

    def update(manager: CFManager, batch: Any) -> None:
        x, y = batch
        nn.functional.cross_entropy(x @ w @ v, y).backward()
        manager.weight_update()
        optimizer.zero_grad()

    trained(directory, kill, loader, update, model=box, opt=optimizer)
    return digest(box), [state["Q"].stride() for state in optimizer.state.values()]


def test_strides(tmp_path: Path) -> None:
    trial = tried(train, tmp_path)
    assert trial.whole.result[1] == [(1, 67), (1, 3)]
    assert trial.is_exact
    assert not trial.warnings


def saved_and_restored(folder: Path, saved: Any, live: Any) -> None:
    with CFManager(folder, CFCheckpoint(one=saved, rng=False), **EVERY) as manager:
        manager.save(wait=True)
    with CFManager(folder, CFCheckpoint(one=live, rng=False), **EVERY) as manager:
        assert manager.restore()


def odd_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {
        "column_major": torch.randn(3, 4).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "with gaps": torch.randn(6, 4)[::2, 1:3],
        "plain": torch.randn(2, 2),
    }


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in one.items():
        assert other[name].stride() == tensor.stride(), name
        assert torch.equal(other[name], tensor), name


def stepped(momentum: dict[str, torch.Tensor] | None = None) -> torch.optim.SGD:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    if momentum is not None:
        optimizer.state[optimizer.param_groups[0]["params"][0]] = momentum
    return optimizer


def test_state_that_is_made_anew_or_lies_differently_gets_the_saved_strides(tmp_path: Path) -> None:
    for number, there in enumerate((None, {n: t.contiguous() for n, t in odd_tensors().items()})):
        live = stepped(there)
        saved_and_restored(tmp_path / str(number), stepped(odd_tensors()), live)
        assert_alike(odd_tensors(), next(iter(live.state.values())))


def test_state_of_the_saved_strides_stays_where_it_is(tmp_path: Path) -> None:
    there = {name: torch.zeros_like(tensor) for name, tensor in odd_tensors().items()}
    there["with gaps"] = torch.zeros(6, 4)[::2, 1:3]
    there["expanded"] = torch.zeros(3, 1).expand(3, 4)
    live = stepped(dict(there))
    saved_and_restored(tmp_path, stepped(odd_tensors()), live)
    assert all(tensor is there[name] for name, tensor in next(iter(live.state.values())).items())
    assert_alike(odd_tensors(), there)


def test_moments_of_channels_last_weights_are_laid_out_as_they_were(tmp_path: Path) -> None:
    def stepped_conv(weights: torch.memory_format, moments: torch.memory_format) -> Any:
        conv = nn.Conv2d(3, 4, 3).to(memory_format=weights)
        optimizer = torch.optim.Adam(conv.parameters())
        conv(torch.ones(1, 3, 8, 8)).sum().backward()
        optimizer.step()
        state = optimizer.state[conv.weight]
        state["exp_avg"] = state["exp_avg"].contiguous(memory_format=moments)
        return conv, optimizer

    _, saved = stepped_conv(torch.channels_last, torch.contiguous_format)
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    live = torch.optim.Adam(conv.parameters())
    saved_and_restored(tmp_path, saved, live)
    state = live.state[conv.weight]
    assert state["exp_avg"].is_contiguous()
    assert state["exp_avg_sq"].is_contiguous(memory_format=torch.channels_last)


def test_a_dict_an_object_and_a_plain_load_get_them_too(tmp_path: Path) -> None:
    class Holder:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    saved, holder = Holder(), Holder()
    saved.state = {**odd_tensors(), "array": np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2)}
    saved_and_restored(tmp_path / "object", saved, holder)
    assert_alike(odd_tensors(), holder.state)
    assert holder.state["array"].strides == saved.state["array"].strides
    live: dict[str, Any] = {"column_major": torch.zeros(4, 3)}
    saved_and_restored(tmp_path / "dict", odd_tensors(), live)
    assert_alike(odd_tensors(), live)
    assert_alike(odd_tensors(), checkfreq.load(tmp_path / "dict")["one"])


def test_a_parameter_keeps_its_own_strides(tmp_path: Path) -> None:
    weight = torch.zeros(4, 3, requires_grad=True)
    live = {"column_major": weight}
    saved_and_restored(tmp_path, {"column_major": odd_tensors()["column_major"]}, live)
    assert live["column_major"] is weight
    assert weight.is_contiguous()
    assert torch.equal(weight, odd_tensors()["column_major"])
