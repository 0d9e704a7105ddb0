"""Fine-tuning with low-rank adapters: only the adapters are trained, and only they are saved.

The frozen base model comes from where it always comes from (here: a seed); tracking the adapters
alone keeps a checkpoint as small as they are. To have the base in it too, track ``model``.

    python -m checkfreq.examples.lora chk/
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


class LoRA(nn.Module):
    """A frozen linear layer, plus the product of two narrow matrices."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.adapter = nn.Sequential(
            nn.Dropout(0.1),
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.zeros_(self.adapter[-1].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


def main(chk_dir: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    data = TensorDataset(inputs, (inputs.square().sum(1) > 32).long())
    loader = DataLoader(data, batch_size=32, shuffle=True)
    base = [nn.Linear(32, 512), nn.Linear(512, 2)]  # as if loaded from a file
    model = nn.Sequential(LoRA(base[0], rank=4), nn.ReLU(), LoRA(base[1], rank=4))
    adapters = nn.ModuleList(layer.adapter for layer in model if isinstance(layer, LoRA))
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=1e-3)

    chk = CFCheckpoint(adapters=adapters, optimizer=optimizer)
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
    main(sys.argv[1])
