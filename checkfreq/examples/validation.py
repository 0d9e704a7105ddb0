"""Validation after each epoch, by a loader whose workers stay alive.

Such workers draw from torch's generator when they start: once in a run that is never killed, once
more after each restart. ``isolated_rng()`` puts the generators back, so that training continues
with the same random numbers either way.

    python -m checkfreq.examples.validation chk/
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator, isolated_rng
from iterators.testing import digest

EPOCHS = 8


@isolated_rng()
@torch.no_grad()
def accuracy_of(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return right / len(loader.dataset)


def main(chk_dir: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4608, 32)
    data = TensorDataset(inputs, (inputs.square().sum(1) > 32).long())
    training, held_out = random_split(data, [4096, 512])
    loader = DataLoader(training, batch_size=32, shuffle=True)
    val_loader = DataLoader(held_out, batch_size=256, num_workers=1, persistent_workers=True)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=1)

    chk = CFCheckpoint(model=model, optimizer=optimizer, scheduler=scheduler)
    with CFManager(chk_dir, chk) as cf_manager:
        train_loader = CFIterator(loader, cf_manager=cf_manager)
        cf_manager.restore()
        for epoch in train_loader.epochs(EPOCHS):
            for x, y in train_loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                cf_manager.weight_update()
                optimizer.zero_grad()
            accuracy = accuracy_of(model, val_loader)
            scheduler.step(accuracy)
            print(f"epoch {epoch}: last loss {loss.item():.6f}, accuracy {accuracy:.4f}")
    print("digest", digest([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]))


if __name__ == "__main__":
    main(sys.argv[1])
