"""A training script as users write it, for torchrun.

It counts how often each sample was learnt, in a dict that is summed over the ranks, so that the
checkpoint itself says whether data was lost or doubled, at whatever number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from checkfreq.store.store import CheckpointStore
from iterators import CFIterator, ResumableDataLoader
from tests.acceptance.rank_training import Pictures, seeded, small_resnet
from tests.patience import slowness

EPOCHS = 3


def main() -> None:
    """Train to the end, through whatever kills come."""
    arguments = _arguments()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(seeded(small_resnet))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.7)
    dataset = Pictures()
    learnt = {"counts": torch.zeros(EPOCHS, len(dataset), dtype=torch.int64)}
    chk = CFCheckpoint(model=model, optimizer=optimizer, scheduler=scheduler, learnt=learnt)
    with CFManager(
        arguments.folder / "chk",
        chk,
        mode=CFMode.MANUAL,
        chk_freq=1,
        config=CFConfig(rank_timeout_s=30.0 * slowness(), nice=0, keep_in_memory_s=0.0),
    ) as cf_manager:
        train_loader = CFIterator(
            ResumableDataLoader(dataset, 4, shuffle=True, seed=5), cf_manager=cf_manager
        )
        cf_manager.restore()
        start = cf_manager.global_step
        _note(arguments.folder, "started", start)
        for epoch in train_loader.epochs(EPOCHS):
            for pictures, labels in train_loader:
                loss = torch.nn.functional.cross_entropy(model(pictures), labels)
                loss.backward()
                cf_manager.weight_update()
                optimizer.zero_grad()
                scheduler.step()
                learnt["counts"][epoch] += _counted(train_loader, len(dataset))
                _die_once(arguments, cf_manager.global_step, start=start)
    if dist.get_rank() == 0:
        result = {"counts": learnt["counts"].tolist()}
        (arguments.folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _counted(loader: CFIterator, num_samples: int) -> torch.Tensor:
    """How often all ranks together were handed each sample in this batch."""
    ids, weights = loader.last_ids, loader.last_weights
    assert ids is not None
    assert weights is not None
    counts = torch.tensor(np.bincount(ids[weights > 0], minlength=num_samples))
    dist.all_reduce(counts)
    return counts


def _note(folder: Path, what: str, step: int) -> None:
    with (folder / "notes.jsonl").open("a") as notes:
        line = {"what": what, "step": step, "rank": dist.get_rank(), "pid": os.getpid()}
        notes.write(json.dumps({**line, "world": dist.get_world_size()}) + "\n")


def _die_once(arguments: argparse.Namespace, step: int, *, start: int) -> None:
    """SIGKILL of a rank, the first time that it gets to its step.

    Not before a step of this start is durable, however busy the machine is.
    """
    for rank, at_step in zip(arguments.die, arguments.die_at, strict=True):
        mark = arguments.folder / f"died-{rank}"
        if (rank, at_step) == (dist.get_rank(), step) and not mark.exists():
            mark.touch()
            end_s = time.monotonic() + 120.0
            while max(CheckpointStore(arguments.folder / "chk").steps(), default=0) <= start:
                assert time.monotonic() < end_s, "no checkpoint of this start became durable"
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--die", type=int, nargs="*", default=[], help="ranks")
    parser.add_argument("--die-at", type=int, nargs="*", default=[], help="and their steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
