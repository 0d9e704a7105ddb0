"""The smallest loop: one model, one optimizer, one schedule.

Run it, kill it at any time, run it again: it continues in the middle of the epoch and prints the
digest of a run that was never killed.

    python -m checkfreq.examples.minimal chk/
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from iterators.testing import digest

EPOCHS = 8


def main(chk_dir: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    data = TensorDataset(inputs, (inputs.square().sum(1) > 32).long())
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

    chk = CFCheckpoint(model=model, optimizer=optimizer, scheduler=scheduler)
    with CFManager(chk_dir, chk) as cf_manager:
        train_loader = CFIterator(loader, cf_manager=cf_manager)
        cf_manager.restore()  # False on a first run
        for epoch in train_loader.epochs(EPOCHS):
            for x, y in train_loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                cf_manager.weight_update()  # optimizer.step(), after the copy in progress
                optimizer.zero_grad()
                scheduler.step()
            print(f"epoch {epoch}: last loss {loss.item():.6f}")
    print("digest", digest([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]))


if __name__ == "__main__":
    main(sys.argv[1])
