"""The states of `benchmarks.sharded`: as FSDP2 leaves a model, and as under DDP."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.peers import Training

_COLUMNS = 1024


class State(Protocol):
    """The saved state, and the change that a weight update makes."""

    module: nn.Module

    def change(self) -> None:
        """Write to every parameter."""
        ...


class ShardedState:
    """As FSDP2 leaves a model: float32 DTensors, their rows distributed over the ranks."""

    def __init__(self, num_bytes: int, *, num_tensors: int) -> None:
        mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
        rows = max(1, num_bytes // num_tensors // 4 // _COLUMNS // mesh.size())
        self.module = nn.Module()
        for index in range(num_tensors):
            local = torch.randn(rows, _COLUMNS)
            parameter = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
            self.module.register_parameter(f"part{index}", parameter)

    def change(self) -> None:
        """Write to every local shard."""
        with torch.no_grad():
            for part in self.module.parameters():
                part.to_local().add_(1.0)  # type: ignore[attr-defined]


class ReplicatedState:
    """As under DDP: the same float32 tensors on every rank."""

    def __init__(self, num_bytes: int, *, num_tensors: int) -> None:
        torch.manual_seed(0)
        rows = max(1, num_bytes // num_tensors // 4 // _COLUMNS)
        self.module = nn.Module()
        for index in range(num_tensors):
            parameter = nn.Parameter(torch.randn(rows, _COLUMNS))
            self.module.register_parameter(f"part{index}", parameter)

    def change(self) -> None:
        """Write to every parameter, the same on every rank."""
        with torch.no_grad():
            for part in self.module.parameters():
                part.add_(1.0)


def training_of(state: State) -> Training:
    """Its module with an optimizer that has no state."""
    return Training(state.module, torch.optim.SGD(state.module.parameters(), lr=0.1))
