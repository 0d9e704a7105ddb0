"""An iterable dataset, read by two workers, that can say where it stands.

With ``state_dict`` and ``load_state_dict`` it resumes at the next sample; without them, its
samples would be made again up to the position. Each worker has a copy of the dataset and its own
state, so the number of workers has to stay the same until the epoch ends.

    python -m checkfreq.examples.iterable chk/
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from iterators.testing import digest

EPOCHS = 5
LENGTH = 4096


class Numbers(IterableDataset):
    """Samples as they come from a stream; each worker takes every second one."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        worker = get_worker_info()
        while self.next < LENGTH:
            index, self.next = self.next, self.next + 1
            if index % worker.num_workers == worker.id:
                x = torch.randn(32, generator=torch.Generator().manual_seed(index))
                yield x + 0.1 * torch.randn(32), int(x.square().sum() > 32)  # noise: augmentation

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def main(chk_dir: str) -> None:
    torch.manual_seed(0)
    loader = DataLoader(Numbers(), batch_size=16, num_workers=2)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2))
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
    main(sys.argv[1])
