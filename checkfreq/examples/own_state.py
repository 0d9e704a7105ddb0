"""Python state of your own: an object with a state dict, and a plain dict.

Whatever training depends on, or is reported at the end, has to be tracked: a running average, a
curriculum, counters. State dicts hold tensors, arrays, numbers, strings and containers of those;
nothing is pickled. Here the dict counts how often each sample was learnt, and the count shows
after any number of kills that none was missed and none learnt twice.

    python -m checkfreq.examples.own_state chk/
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from iterators.testing import digest

EPOCHS = 8


class RunningMean:
    """The mean of all losses so far, and the last hundred of them."""

    def __init__(self) -> None:
        self.total, self.count, self.recent = 0.0, 0, []

    def add(self, loss: float) -> None:
        self.total, self.count = self.total + loss, self.count + 1
        self.recent = [*self.recent, loss][-100:]

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count, "recent": self.recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count, self.recent = state["total"], state["count"], state["recent"]


def main(chk_dir: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    data = TensorDataset(inputs, (inputs.square().sum(1) > 32).long(), torch.arange(4096))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = RunningMean()
    learnt = {"counts": torch.zeros(EPOCHS, 4096, dtype=torch.int64)}

    chk = CFCheckpoint(model=model, optimizer=optimizer, losses=losses, learnt=learnt)
    with CFManager(chk_dir, chk) as cf_manager:
        train_loader = CFIterator(loader, cf_manager=cf_manager)
        cf_manager.restore()
        for epoch in train_loader.epochs(EPOCHS):
            for x, y, ids in train_loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                cf_manager.weight_update()
                optimizer.zero_grad()
                losses.add(loss.item())
                learnt["counts"][epoch, ids] += 1
            print(f"epoch {epoch}: mean loss {losses.total / losses.count:.6f}")
    print("each sample once per epoch:", bool((learnt["counts"] == 1).all()))
    print("digest", digest([model.state_dict(), optimizer.state_dict(), losses.state_dict()]))


if __name__ == "__main__":
    main(sys.argv[1])
