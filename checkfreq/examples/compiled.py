"""A compiled model: ``torch.compile`` needs nothing more.

A checkpoint of it fits the model that is not compiled, and the other way round. With batches of
one size (``drop_last=True``) every process runs the same kernels. Where sizes vary, torch compiles
again when it meets the second one, which in a resumed process may be a different one.

    python -m checkfreq.examples.compiled chk/ [inductor | aot_eager]

inductor, torch's default, needs a C++ compiler on the CPU; aot_eager compiles without one.
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


def main(chk_dir: str, backend: str = "inductor") -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4100, 32)
    data = TensorDataset(inputs, (inputs.square().sum(1) > 32).long())
    loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
    bare = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2))
    model = torch.compile(bare, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    chk = CFCheckpoint(model=model, optimizer=optimizer)
    with CFManager(chk_dir, chk) as cf_manager:
        train_loader = CFIterator(loader, cf_manager=cf_manager)
        cf_manager.restore()
        for epoch in train_loader.epochs(EPOCHS):
            for x, y in train_loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                cf_manager.weight_update()
                optimizer.zero_grad()
            print(f"epoch {epoch}: last loss {loss.item():.6f}")
    print("digest", digest([model.state_dict(), optimizer.state_dict()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
