"""Gradient accumulation: one weight update for every four batches.

``train_loader.enumerate()`` counts the batches of the epoch, also in a resumed process, where
Python's ``enumerate`` would start again from 0. A boundary, where a checkpoint can be taken, comes
after each update: never in the middle of a group of batches.

    python -m checkfreq.examples.accumulation chk/
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from iterators.testing import digest

EPOCHS = 10
GROUP = 4


def main(chk_dir: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4000, 32)
    data = TensorDataset(inputs, (inputs.square().sum(1) > 32).long())
    loader = DataLoader(data, batch_size=32, shuffle=True)  # 125 batches: the last group has one
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    chk = CFCheckpoint(model=model, optimizer=optimizer)
    with CFManager(chk_dir, chk) as cf_manager:
        train_loader = CFIterator(loader, cf_manager=cf_manager)
        cf_manager.restore()
        for epoch in train_loader.epochs(EPOCHS):
            for i, (x, y) in train_loader.enumerate():
                loss = nn.functional.cross_entropy(model(x), y)
                (loss / GROUP).backward()
                if (i + 1) % GROUP == 0 or i + 1 == len(train_loader):
                    cf_manager.weight_update()
                    optimizer.zero_grad()
            print(f"epoch {epoch}: last loss {loss.item():.6f}")
    print("digest", digest([model.state_dict(), optimizer.state_dict()]))


if __name__ == "__main__":
    main(sys.argv[1])
