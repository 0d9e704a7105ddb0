"""FSDP2 with one rank, its state on the device or on the host, and dropout: a SIGKILL, same bits.

    python -m tests.gpu.stages.fsdp [--dry]

NCCL on a GPU, gloo in a dry run. With the state on the host (``CPUOffloadPolicy``) no tracked
tensor tells of the device whose generator dropout draws from.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from iterators.testing import digest
from tests.gpu.stages.resuming import (
    Losses,
    Stage,
    begin,
    claim_same_bits,
    digests,
    opened,
    part,
    restore,
    tick,
)

_STEPS = 24


def main() -> None:
    """Print a claim for each part of the state, without offload and with it."""
    stage = Stage.begin()
    context = stage.processes()
    for offload in (False, True):
        place = "host" if offload else "device"
        with part(f"state on the {place}") as folder:
            program = partial(train, offload=offload)
            claim_same_bits(stage, program, folder, kills=(13,), context=context, place=place)


def train(stage: Stage, directory: str, kill: int, *, offload: bool) -> dict[str, str]:
    """Train, or up to the kill."""
    begin()
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # there may be no other
    backend = "gloo" if stage.is_dry else "cpu:gloo,cuda:nccl" if offload else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    width, layers = (32, 2) if stage.is_dry else (1024, 8)
    model = _sharded(stage, width, layers, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = Losses(_STEPS, torch.device("cpu") if offload else stage.device)
    with opened(directory, 2, model=model, optimizer=optimizer, losses=losses) as manager:
        restore(stage, manager, model)
        while manager.global_step < _STEPS:
            tick(manager, kill)
            loss = model(torch.randn(16, width, device=stage.device)).square().mean()
            loss.backward()
            losses.note(manager, loss)
            manager.weight_update()
            optimizer.zero_grad()
            manager.step()
        found = digests(losses=losses)
        found["model"] = digest(_local(model.state_dict()))
        found["optimizer"] = digest(_local(optimizer.state_dict()))
    dist.destroy_process_group()
    return found


def _sharded(stage: Stage, width: int, layers: int, *, offload: bool) -> nn.Module:
    """Its parameters are where the state is; FSDP moves them to the mesh's device if need be."""
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers)
    ]
    model = nn.Sequential(*blocks)
    options: dict[str, Any] = {"mesh": init_device_mesh(stage.device.type, (1,))}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=not stage.is_dry)
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def _local(value: Any) -> Any:
    """The same with this rank's shard of every DTensor."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, dict):
        return {key: _local(item) for key, item in value.items()}
    return value


if __name__ == "__main__":
    main()
