"""State of FSDP2 with CPU offload: DTensors whose mesh is a GPU's and which lie on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import checkfreq
from checkfreq import CFCheckpoint, CFManager, CFMode


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of one GPU, which need not be there: nothing is sent, and no tensor is put on it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cuda", [0], _init_backend=False)
    dist.destroy_process_group()


def offloaded(value: Tensor, mesh: DeviceMesh) -> DTensor:
    """The same values on the host; DTensor.from_local() would move them to the GPU."""
    made = torch.empty_like(DTensor.from_local(value.to("meta"), mesh, [Shard(0)]), device="cpu")
    assert isinstance(made, DTensor)
    made.to_local().copy_(value)
    return made


def trained(mesh: DeviceMesh, *, updates: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 8, bias=False)
    model.weight = nn.Parameter(offloaded(torch.randn(8, 4), mesh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(updates):
        update(model, optimizer, number)
    return model, optimizer


def update(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    weight = weight_of(model)
    gradient = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    weight.grad = offloaded(gradient, weight.device_mesh)
    optimizer.step()


def weight_of(model: nn.Module) -> DTensor:
    (weight,) = model.parameters()
    assert isinstance(weight, DTensor)
    return weight


def test_a_restored_optimizer_goes_on_where_its_parameters_are(
    tmp_path: Path, mesh: DeviceMesh
) -> None:
    model, optimizer = trained(mesh, updates=3)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    with CFManager(tmp_path, chk, mode=CFMode.MANUAL, chk_freq=1) as manager:
        manager.step()
        manager.wait()
    update(model, optimizer, 3)

    resumed, fresh = trained(mesh, updates=0)
    checkfreq.load(tmp_path, into={"model": resumed, "optimizer": fresh})
    assert fresh.state[weight_of(resumed)]["exp_avg"].device == torch.device("cpu")
    update(resumed, fresh, 3)
    found, expected = (weight_of(made).to_local() for made in (resumed, model))
    assert torch.equal(found, expected)
