"""Early stopping: ``finish()`` says durably that the run is over.

The best loss and the number of epochs since are in a tracked dict: otherwise the count would start
over at each restart. Started once more, a finished run restores its last checkpoint, says that it
is finished, and trains nothing.

    python -m checkfreq.examples.early_stopping chk/
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator, isolated_rng
from iterators.testing import digest

MOST_EPOCHS = 50
PATIENCE = 2


def main(chk_dir: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2560, 32)
    labels = (inputs.square().sum(1) > 32).long()
    loader = DataLoader(TensorDataset(inputs[:2048], labels[:2048]), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    progress = {"best_loss": float("inf"), "epochs_since": 0}

    chk = CFCheckpoint(model=model, optimizer=optimizer, progress=progress)
    with CFManager(chk_dir, chk) as cf_manager:
        train_loader = CFIterator(loader, cf_manager=cf_manager)
        cf_manager.restore()
        for epoch in train_loader.epochs(MOST_EPOCHS):
            for x, y in train_loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                cf_manager.weight_update()
                optimizer.zero_grad()
            with isolated_rng(), torch.no_grad():
                model.eval()
                loss = nn.functional.cross_entropy(model(inputs[2048:]), labels[2048:]).item()
                model.train()
            improved = loss < progress["best_loss"]
            progress["best_loss"] = min(loss, progress["best_loss"])
            progress["epochs_since"] = 0 if improved else progress["epochs_since"] + 1
            print(f"epoch {epoch}: validation loss {loss:.6f}")
            if progress["epochs_since"] > PATIENCE:
                cf_manager.finish()
                break
    print("digest", digest([model.state_dict(), optimizer.state_dict(), progress]))


if __name__ == "__main__":
    main(sys.argv[1])
