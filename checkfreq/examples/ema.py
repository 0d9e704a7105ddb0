"""An exponential moving average of the weights, updated after each step.

The average is tracked like any other module, which would copy it before the next iteration begins.
For large models, ``settled=["ema"]`` and ``with cf_manager.updating():`` around its update let the
copy run during the next forward and backward pass, as that of the weights does.

    python -m checkfreq.examples.ema chk/
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
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
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    chk = CFCheckpoint(model=model, optimizer=optimizer, ema=ema, settled=["ema"])
    with CFManager(chk_dir, chk) as cf_manager:
        train_loader = CFIterator(loader, cf_manager=cf_manager)
        cf_manager.restore()
        for epoch in train_loader.epochs(EPOCHS):
            for x, y in train_loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                cf_manager.weight_update()
                with cf_manager.updating():  # waits for the copy in progress, as an update does
                    ema.update_parameters(model)
                optimizer.zero_grad()
            print(f"epoch {epoch}: last loss {loss.item():.6f}")
    print("digest", digest([model.state_dict(), optimizer.state_dict(), ema.state_dict()]))


if __name__ == "__main__":
    main(sys.argv[1])
