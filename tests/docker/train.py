"""A training without an end, with a loader process: mounted into a container and stopped there."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator

torch.manual_seed(0)
inputs = torch.randn(512, 64)
loader = DataLoader(
    TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=16, shuffle=True, num_workers=1
)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters())
chk = CFCheckpoint(model=model, optimizer=optimizer)
with CFManager(sys.argv[1], chk) as cf_manager:
    train_loader = CFIterator(loader, cf_manager=cf_manager)
    print(f"restored {cf_manager.restore()}, step {cf_manager.global_step}")
    for _ in train_loader.epochs(10**6):
        for number, (x, y) in enumerate(train_loader):
            nn.functional.cross_entropy(model(x), y).backward()
            cf_manager.weight_update()
            optimizer.zero_grad()
            if number % 5 == 4:  # signals are handled from this process's first boundary on
                print(f"training {cf_manager.global_step + 1}")
