"""The best checkpoint by validation loss is kept beside the newest ones.

``save(metrics=...)`` after an epoch's validation asks for a checkpoint of the epoch's last
boundary, and ``KeepBest`` removes neither that of the lowest loss nor the newest two.
``checkfreq.load`` reads the best one's weights at the end.

    python -m checkfreq.examples.best_checkpoint chk/
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import checkfreq
from checkfreq import CFCheckpoint, CFManager, KeepBest
from iterators import CFIterator, isolated_rng
from iterators.testing import digest

EPOCHS = 10


def main(chk_dir: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2560, 32)
    labels = (inputs.square().sum(1) > 32).long()
    loader = DataLoader(TensorDataset(inputs[:2048], labels[:2048]), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    chk = CFCheckpoint(model=model, optimizer=optimizer)
    retention = KeepBest(metric="loss", num_kept=1, num_last=2)
    with CFManager(chk_dir, chk, retention=retention) as cf_manager:
        train_loader = CFIterator(loader, cf_manager=cf_manager)
        cf_manager.restore()
        for epoch in train_loader.epochs(EPOCHS):
            for x, y in train_loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                cf_manager.weight_update()
                optimizer.zero_grad()
            with isolated_rng(), torch.no_grad():
                model.eval()
                loss = nn.functional.cross_entropy(model(inputs[2048:]), labels[2048:]).item()
                model.train()
            cf_manager.save(
                metrics={"loss": loss}
            )  # taken at the epoch's last boundary, after this
            print(f"epoch {epoch}: validation loss {loss:.6f}")
    weights = checkfreq.load(chk_dir, step="best:loss", only=["model"])["model"]
    print(f"best: step {cf_manager.best_step('loss')}, weights {digest(dict(weights))}")
    print("digest", digest([model.state_dict(), optimizer.state_dict()]))


if __name__ == "__main__":
    main(sys.argv[1])
