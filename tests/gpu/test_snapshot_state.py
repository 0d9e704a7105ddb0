"""State on a device: classes, placement at restore, and no synchronisation while capturing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint
from tests.state.support import bits, restore, state_bits, take

#: Warnings of CUDA libraries and of PyTorch's own debug modes are not ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]


def run(**kwargs: Any) -> CFCheckpoint:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **kwargs)
    scaler = torch.amp.GradScaler("cuda")
    return CFCheckpoint(model=model, optimizer=optimizer, scaler=scaler)


def train(chk: CFCheckpoint, steps: int) -> None:
    model, optimizer = chk.tracked["model"], chk.tracked["optimizer"]
    scaler = chk.tracked["scaler"]
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 4, device="cuda")).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def test_state_that_only_an_update_changes_is_settled_wherever_it_is() -> None:
    chk = run()
    train(chk, 1)
    captured = capture(chk)
    found = {f"{ref.stem}.{ref.key}": ref.settled for ref in captured.tensors}
    assert found["model.0.weight"]
    assert found["optimizer.state.0.exp_avg"]
    assert found["optimizer.state.0.step"]
    for volatile in ("model.1.running_mean", "scaler.scale", "rng.torch"):
        assert not found[volatile]
    assert f"rng.cuda:{torch.cuda.current_device()}" in found


def test_capture_waits_for_no_device() -> None:
    chk = run()
    train(chk, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        capture(chk)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("stray", [0, 3])
@pytest.mark.parametrize("kwargs", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_training_continues_with_the_same_bits(kwargs: dict[str, bool], stray: int) -> None:
    first = run(**kwargs)
    train(first, 3)
    shot = take(first)
    train(first, 3)
    second = run(**kwargs)
    train(second, stray)
    restore(second, shot)
    train(second, 3)
    assert state_bits(second) == state_bits(first)
    places = [
        [
            (name, str(t.device))
            for state in chk.tracked["optimizer"].state.values()
            for name, t in state.items()
        ]
        for chk in (first, second)
    ]
    assert places[0] == places[1]


def test_a_device_that_holds_no_state_goes_on_with_its_numbers() -> None:
    torch.ones(1, device="cuda")
    chk = CFCheckpoint(model=nn.Linear(2, 2))
    shot = take(chk)
    drawn = torch.rand(5, device="cuda")
    torch.cuda.manual_seed(9)
    restore(chk, shot)
    assert torch.equal(torch.rand(5, device="cuda"), drawn)


def test_a_checkpoint_from_a_device_loads_on_the_host() -> None:
    chk = run()
    train(chk, 1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    host = CFCheckpoint(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    restore(host, take(chk), only=("model", "optimizer"))
    assert bits(model.state_dict()) == bits(chk.tracked["model"].state_dict())
    assert all(t.is_cpu for s in host.tracked["optimizer"].state.values() for t in s.values())


def test_tensors_of_other_objects_go_back_to_their_device() -> None:
    live: dict[str, Any] = {}
    restore(CFCheckpoint(d=live), take(CFCheckpoint(d={"x": torch.ones(2, device="cuda")})))
    assert live["x"].is_cuda
