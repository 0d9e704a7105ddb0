"""A training script with checkfreq, as a user has it: clean, or with one fault that is planted.

    python train.py [FAULT]

Its own directory, its own data; nothing in it knows of a crash test.
"""

import os
import random
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from checkfreq import CFCheckpoint, CFManager, CFMode
from iterators import CFIterator, isolated_rng

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
#: The learning rate is not a scheduler's.
OWN_RATE = ("local-counter", "clock")
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
EPOCHS = 3


class Points(Dataset):
    """Eight numbers and one of three classes, with noise."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
        self.num_served = 0
        self.is_seeded = False

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(8)
        if FAULT == "stateful-augmentation":
            self.num_served += 1
            noise = noise * (self.num_served % 7)
        if FAULT == "torch-seed-in-dataset" and not self.is_seeded:
            self.is_seeded = True
            torch.manual_seed(7)
            noise = torch.randn(8)
        return self.x[index] + 0.1 * noise, int(self.x[index, :3].argmax())


def main() -> None:
    start_s = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.8)
    held_out = TensorDataset(torch.randn(20, 8))
    validation = (
        DataLoader(held_out, batch_size=10, num_workers=1, persistent_workers=True)
        if FAULT == "persistent-validation-loader"
        else DataLoader(held_out, batch_size=10)
    )
    network = model
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
        network = nn.parallel.DistributedDataParallel(model)

    tracked = {"model": model, "optimizer": optimizer}
    if FAULT in OWN_RATE:
        del scheduler
    elif FAULT != "forgotten-scheduler":
        tracked["scheduler"] = scheduler
    count = 0

    with CFManager("chk", CFCheckpoint(**tracked), mode=CFMode.MANUAL, chk_freq=4) as manager:
        loader = DataLoader(Points(80), batch_size=4 // RANKS, shuffle=True)
        train_loader = CFIterator(loader, cf_manager=manager)
        manager.restore()
        for _ in range(EPOCHS) if FAULT == "range" else train_loader.epochs(EPOCHS):
            model.train()
            if FAULT == "peek":
                next(iter(train_loader))
            for x, y in train_loader:
                count += 1
                elapsed_s = time.monotonic() - start_s
                for group in optimizer.param_groups if FAULT in OWN_RATE else []:
                    group["lr"] = 0.01 / (1 + (count if FAULT == "local-counter" else elapsed_s))
                loss = nn.functional.cross_entropy(network(x), y)
                loss.backward()
                manager.weight_update()
                optimizer.zero_grad()
                if FAULT not in OWN_RATE:
                    scheduler.step()
            model.eval()
            if FAULT == "persistent-validation-loader":
                sum(model(x).sum() for (x,) in validation)
            else:
                with isolated_rng():
                    sum(model(x).sum() for (x,) in validation)
    if FAULT == "after-loop":
        print(loss.item())
    print("done", flush=True)


main()
