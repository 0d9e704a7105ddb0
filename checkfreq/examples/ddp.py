"""DistributedDataParallel: the loop stays as it is, and every rank runs it.

The iterator gives each rank its share of the data, without a sampler. A restart may
have a different number of ranks; with the same number it ends with the same bits. Start it with

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 \\
        --max-restarts 3 -m checkfreq.examples.ddp chk/

and kill a rank: torchrun starts all of them again, and they continue from the last checkpoint.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFConfig, CFManager
from iterators import CFIterator
from iterators.testing import digest

EPOCHS = 6
NUM_SAMPLES = 4096


def settle_buckets(model: DistributedDataParallel) -> None:
    """Two backward passes that are thrown away, for bit-for-bit resumes above two ranks.

    DDP rebuilds its gradient buckets when the second pass begins, and their layout decides in which
    order the gradients of three or more ranks are summed. So every process makes these passes
    before its first update. In evaluation mode they change neither buffers nor random generators.
    """
    model.eval()
    for _ in range(2):
        model(torch.zeros(2, 32)).sum().backward()
    model.zero_grad()
    model.train()


def main(chk_dir: str) -> None:
    dist.init_process_group("gloo")  # before the manager
    torch.manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 32)
    labels = (inputs.square().sum(1) > 32).long()
    data = TensorDataset(inputs, labels, torch.arange(NUM_SAMPLES))
    loader = DataLoader(data, batch_size=16, shuffle=True)  # 16 for each rank
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    learnt = {"counts": torch.zeros(EPOCHS, NUM_SAMPLES, dtype=torch.int64)}
    settle_buckets(model)

    chk = CFCheckpoint(model=model, optimizer=optimizer, learnt=learnt)
    config = CFConfig(rank_timeout_s=20)  # also how long a restart may wait for a dead rank
    with CFManager(chk_dir, chk, config=config) as cf_manager:
        train_loader = CFIterator(loader, cf_manager=cf_manager)
        if not cf_manager.restore():
            torch.manual_seed(dist.get_rank())  # the weights are the same, dropout is not
        for epoch in train_loader.epochs(EPOCHS):
            for x, y, ids in train_loader:
                losses = nn.functional.cross_entropy(model(x), y, reduction="none")
                weights = torch.tensor(train_loader.last_weights)  # 0 for a pad, else 1
                num_samples = train_loader.last_num_samples  # of all ranks
                loss = (losses * weights).sum() * train_loader.world / num_samples
                loss.backward()
                cf_manager.weight_update()
                optimizer.zero_grad()
                counts = torch.bincount(ids[weights > 0], minlength=NUM_SAMPLES)
                dist.all_reduce(counts)
                learnt["counts"][epoch] += counts  # the same on all ranks, so any number may resume
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: last loss {loss.item():.6f}")
    if dist.get_rank() == 0:
        print("each sample once per epoch:", bool((learnt["counts"] == 1).all()))
        print("digest", digest([model.state_dict(), optimizer.state_dict()]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
