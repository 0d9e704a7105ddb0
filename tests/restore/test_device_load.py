"""Whole loads into live objects on the fake device, which is registered as a backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.integrations.dcp import CFStorageReader
from tests.restore.device_filling import held
from tests.restore.shared_device import SharedDevice, registered


@pytest.fixture
def fake() -> Iterator[SharedDevice]:
    made = SharedDevice(1)
    with registered(made):
        yield made


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(4, 5), nn.Linear(300, 90)
    )
    return model.to(memory_format=torch.channels_last)


def on_device(fake: SharedDevice, model: nn.Module) -> nn.Module:
    """The module, with its tensors moved to the fake device, and work queued that writes them."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(fake.tensor(parameter.detach()))
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = fake.tensor(buffer)
    for tensor in model.state_dict().values():
        fake.training_writes(tensor, 5)
    return model


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def saved(chk_dir: Path) -> dict[str, Tensor]:
    """A checkpoint of a network on the host; its tensors by name."""
    model = network(1)
    optimizer = stepped(model)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    with CFManager(chk_dir, chk, mode=CFMode.MANUAL, chk_freq=1) as manager:
        manager.restore()
        manager.step()
    return tensors_of(model, optimizer)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": value for name, value in state.items()}
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        held(found[name]) == held(expected[name]) for name in expected
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_load_into_fills_live_tensors_on_the_device_in_place(
    tmp_path: Path, fake: SharedDevice
) -> None:
    expected = saved(tmp_path)
    model = on_device(fake, network(2))
    optimizer = stepped(model)
    places = {name: t.data_ptr() for name, t in tensors_of(model, optimizer).items()}
    checkfreq.load(tmp_path, into={"model": model, "optimizer": optimizer})
    fake.run_all()
    found = tensors_of(model, optimizer)
    assert same(found, expected)
    assert {name: found[name].data_ptr() for name in model.state_dict()} == {
        name: places[name] for name in model.state_dict()
    }
    assert fake.copied_to == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert fake.registrations.num_bytes == 0
    live = on_device(fake, network(3)).state_dict()
    dcp.load({"model": live}, storage_reader=CFStorageReader(tmp_path))
    fake.run_all()
    assert same(dict(live), {name: expected[name] for name in live})
    assert fake.copied_to == 2 * sum(tensor.nbytes for tensor in live.values())
