"""A trainer of functions around containers, as torchtitan's and torchtune's are.

The model is in parts, ``optimizers`` and ``schedulers`` are containers that step all they hold, and
``train_step`` draws as many batches as it accumulates. The objects inside the containers are
tracked, and the loader is wrapped.

    python -m checkfreq.examples.containers chk/
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from iterators.testing import digest

STEPS, ACCUMULATE = 400, 2


class Optimizers:
    """An optimizer for each part of the model."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Schedulers:
    """A scheduler for each optimizer."""

    def __init__(self, optimizers: Optimizers) -> None:
        def warmup(step: int) -> float:
            return min(1.0, (step + 1) / 50)

        self.schedulers = [LambdaLR(one, warmup) for one in optimizers.optimizers]

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()


class Trainer:
    """The parts, the containers, and what one step does with them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        inputs = torch.randn(2048, 16)
        data = TensorDataset(inputs, inputs[:, :4].argmax(1))
        self.dataloader = DataLoader(data, batch_size=32, shuffle=True)
        embed = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1))
        self.model_parts: list[nn.Module] = [embed, nn.Linear(64, 4)]
        self.optimizers = Optimizers(self.model_parts)
        self.lr_schedulers = Schedulers(self.optimizers)

    def train_step(self, batches: Iterator[list[Tensor]]) -> Tensor:
        self.optimizers.zero_grad()
        total = torch.zeros(())
        for _ in range(ACCUMULATE):
            x, y = next(batches)
            for part in self.model_parts:
                x = part(x)
            loss = nn.functional.cross_entropy(x, y) / ACCUMULATE
            loss.backward()
            total += loss.detach()
        self.optimizers.step()
        self.lr_schedulers.step()
        return total

    def tracked(self) -> dict[str, object]:
        """Every object with state, by name."""
        found: dict[str, object] = {}
        for number, part in enumerate(self.model_parts):
            found[f"model_{number}"] = part
            found[f"optimizer_{number}"] = self.optimizers.optimizers[number]
            found[f"scheduler_{number}"] = self.lr_schedulers.schedulers[number]
        return found


def main(chk_dir: str) -> None:
    trainer = Trainer()
    chk = CFCheckpoint(**trainer.tracked())
    with CFManager(chk_dir, chk) as cf_manager:
        dataloader = CFIterator(trainer.dataloader, cf_manager=cf_manager, accumulate=ACCUMULATE)
        cf_manager.restore()
        batches = iter(dataloader.steps(STEPS))
        while cf_manager.global_step + dataloader.is_using_batch < STEPS:
            loss = trainer.train_step(batches)
            if (cf_manager.global_step + 1) % 50 == 0:
                print(f"step {cf_manager.global_step + 1}: loss {loss.item():.6f}")
    print("digest", digest([one.state_dict() for one in trainer.tracked().values()]))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1])
