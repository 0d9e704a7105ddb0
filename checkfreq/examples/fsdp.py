"""FSDP2: every rank keeps, and writes, its shards of the model and the optimizer.

A restart may have a different number of ranks: each reads the parts of the saved shards that it
needs. Start it with

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 \\
        --max-restarts 3 -m checkfreq.examples.fsdp chk/
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFConfig, CFManager
from iterators import CFIterator
from iterators.testing import digest

EPOCHS = 6


def main(chk_dir: str) -> None:
    dist.init_process_group("gloo")  # before the manager
    torch.manual_seed(0)
    inputs = torch.randn(2048, 32)
    data = TensorDataset(inputs, (inputs.square().sum(1) > 32).long())
    loader = DataLoader(data, batch_size=16, shuffle=True)  # 16 for each rank
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # of the sharded parameters

    chk = CFCheckpoint(model=model, optimizer=optimizer)
    config = CFConfig(rank_timeout_s=20)  # also how long a restart may wait for a dead rank
    with CFManager(chk_dir, chk, config=config) as cf_manager:
        train_loader = CFIterator(loader, cf_manager=cf_manager)
        if not cf_manager.restore():
            torch.manual_seed(dist.get_rank())  # dropout differs from rank to rank
        for epoch in train_loader.epochs(EPOCHS):
            for x, y in train_loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                cf_manager.weight_update()
                optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: last loss {loss.item():.6f}")
    weights = {name: one.full_tensor() for name, one in model.named_parameters()}  # collective
    if dist.get_rank() == 0:
        print("digest", digest(weights))
    dist.barrier()  # no rank leaves while another still gathers
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
