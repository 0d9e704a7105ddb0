"""Mixed precision: autocast and a GradScaler, with gradient clipping.

The scaler is tracked, so that its scale is restored; ``weight_update(scaler=...)`` is
``scaler.step(optimizer)`` and ``scaler.update()``. A step that the scaler skips, because a
gradient overflowed, ends an iteration like any other. On a GPU write "cuda" for "cpu".

    python -m checkfreq.examples.amp chk/
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
    inputs = torch.randn(2048, 32)
    data = TensorDataset(inputs, (inputs.square().sum(1) > 32).long())
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=20)  # grows often: some steps overflow

    chk = CFCheckpoint(model=model, optimizer=optimizer, scaler=scaler)
    with CFManager(chk_dir, chk) as cf_manager:
        train_loader = CFIterator(loader, cf_manager=cf_manager)
        cf_manager.restore()
        for epoch in train_loader.epochs(EPOCHS):
            for x, y in train_loader:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = nn.functional.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                cf_manager.weight_update(scaler=scaler)
                optimizer.zero_grad()
            print(f"epoch {epoch}: last loss {loss.item():.6f}, scale {scaler.get_scale():g}")
    print("digest", digest([model.state_dict(), optimizer.state_dict(), scaler.state_dict()]))


if __name__ == "__main__":
    main(sys.argv[1])
