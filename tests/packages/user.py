"""A user's training script, to be checked by ``mypy --strict`` against the installed wheel."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import checkfreq
from checkfreq import CFCheckpoint, CFConfig, CFManager, KeepBest, KeepLast, Mirror
from checkfreq.errors import CheckFreqError, NoCheckpointError
from checkfreq.helpers import AverageMeter, atomic_save
from iterators import CFIterator, TrainingStopped, isolated_rng


class Run(CFManager):
    """A manager of one's own."""

    def say(self) -> str:
        return f"{self.stats()['restored_from']}"


def train(folder: Path, *, mirror: str | None) -> float:
    inputs = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=16)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chk = CFCheckpoint(model=model, optimizer=optimizer, history={"losses": [1.0]})
    config = CFConfig(mirror=None if mirror is None else Mirror(mirror))
    retention = KeepLast(2) | KeepBest(metric="loss")
    with Run(folder, chk, max_overhead=0.035, config=config, retention=retention) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        restored: bool = manager.restore()
        for epoch in batches.epochs(2):
            for x, y in batches:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                manager.weight_update()
                optimizer.zero_grad()
            with isolated_rng():
                print(epoch, restored, manager.say())
        manager.save(wait=True, metrics={"loss": float(loss)})
    return float(loss)


def look(folder: Path) -> object:
    try:
        return checkfreq.load(folder)["model"]
    except NoCheckpointError as error:
        raise SystemExit(str(error)) from error
    except (CheckFreqError, TrainingStopped):
        return AverageMeter("loss"), atomic_save
