"""A plain DataLoader with a resumable sampler, for loops that should stay as they are.

The sampler is tracked like any other object. ``advance`` tells it what was used, so that what the
loader has only prefetched does not count. Under DDP use ``ResumableDistributedSampler``.

    python -m checkfreq.examples.samplers chk/
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFManager
from iterators import ResumableSampler
from iterators.testing import digest

EPOCHS = 8


def main(chk_dir: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    data = TensorDataset(inputs, (inputs.square().sum(1) > 32).long())
    sampler = ResumableSampler(data, seed=0)
    loader = DataLoader(data, 32, sampler=sampler, generator=torch.Generator())
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    chk = CFCheckpoint(model=model, optimizer=optimizer, sampler=sampler)
    with CFManager(chk_dir, chk) as cf_manager:
        cf_manager.restore()
        for epoch in range(sampler.epoch, EPOCHS):
            sampler.set_epoch(epoch)  # keeps the position in the restored epoch
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                cf_manager.weight_update()
                optimizer.zero_grad()
                sampler.advance(len(x))
                cf_manager.step()
                if cf_manager.stopped:  # told to stop, and the last checkpoint is durable
                    sys.exit(75)
                if cf_manager.global_step % 128 == 0:
                    print(f"step {cf_manager.global_step}: loss {loss.item():.6f}")
    print("digest", digest([model.state_dict(), optimizer.state_dict()]))


if __name__ == "__main__":
    main(sys.argv[1])
