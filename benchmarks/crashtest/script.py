"""The script of which verdicts are timed: about ten seconds, most of them spent waiting.

    python benchmarks/crashtest/script.py --steps 200 --wait 0.04 [--fault NAME]

Waiting stands for an accelerator that computes. ``forgotten-scheduler`` differs at once after a
restore; ``validation-draws`` only at the end of the epoch.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFManager, CFMode
from iterators import CFIterator, isolated_rng

_EPOCHS, _BATCH = 2, 8
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def _train(steps: int, wait_s: float, fault: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
    inputs = torch.randn(steps // _EPOCHS * _BATCH, 64)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    validation = DataLoader(
        TensorDataset(torch.randn(32, 64)),
        batch_size=16,
        num_workers=1,
        persistent_workers=True,
    )
    network: nn.Module = model
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
        network = nn.parallel.DistributedDataParallel(model)
    tracked = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if fault == "forgotten-scheduler":
        del tracked["scheduler"]
    with CFManager("chk", CFCheckpoint(**tracked), mode=CFMode.MANUAL, chk_freq=20) as manager:
        loader = DataLoader(data, batch_size=_BATCH // RANKS, shuffle=True)
        train_loader = CFIterator(loader, cf_manager=manager)
        manager.restore()
        for _ in train_loader.epochs(_EPOCHS):
            for x, y in train_loader:
                nn.functional.cross_entropy(network(x), y).backward()
                time.sleep(wait_s)
                manager.weight_update()
                optimizer.zero_grad()
                scheduler.step()
            if fault == "validation-draws":
                _validate(model, validation)
            else:
                with isolated_rng():
                    _validate(model, validation)


def _validate(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> None:
    with torch.no_grad():
        sum(model(x).sum() for (x,) in loader)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--wait", type=float, default=0.04)
    parser.add_argument("--fault", default="")
    return parser.parse_args()


if __name__ == "__main__":
    args = _arguments()
    _train(args.steps, args.wait, args.fault)
