"""A training that knows nothing of SLURM: started again, it continues.

It counts how often each sample was learnt, in a dict that is checkpointed with the rest, so that
the result says whether data was lost or doubled. In its first ``--slow-runs`` runs it slows down
after a while, so that it is still there when the time is up; that changes nothing it computes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from iterators import CFIterator
from iterators.testing import digest

EPOCHS = 6
NUM_SAMPLES = 661  # which no batch divides
#: Of a slow run, the iterations at full speed.
BRISK = 20


def main() -> None:
    """Train to the end, or until told to stop."""
    arguments = _arguments()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 16)
    labels = (inputs.square().sum(1) > 16).long()
    data = TensorDataset(inputs, labels, torch.arange(NUM_SAMPLES))
    model: nn.Module = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2)
    )
    model = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.8)
    learnt = {"counts": torch.zeros(EPOCHS, NUM_SAMPLES, dtype=torch.int64)}
    tracked = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "learnt": learnt}
    notices = ("slurm", "aws") if arguments.metadata_url else None
    config = CFConfig(
        notices=() if arguments.only_signals else notices,
        metadata_url=arguments.metadata_url,
        stop_grace_s=arguments.stop_grace_s,
        requeue=arguments.requeue,
        takeover_s=arguments.takeover_s,
        mirror=arguments.mirror,
        nice=0,
    )
    chk, every = CFCheckpoint(**tracked), arguments.chk_freq
    mode = CFMode.MANUAL if every else CFMode.AUTO
    with CFManager(arguments.chk_dir, chk, mode=mode, chk_freq=every, config=config) as cf_manager:
        loader = DataLoader(data, batch_size=8, shuffle=True)
        train_loader = CFIterator(loader, cf_manager=cf_manager)
        cf_manager.restore()
        start = cf_manager.global_step
        is_slow = _note(arguments.chk_dir, start) < arguments.slow_runs
        for epoch in train_loader.epochs(EPOCHS):
            for x, y, ids in train_loader:
                nn.functional.cross_entropy(model(x), y).backward()
                cf_manager.weight_update()
                optimizer.zero_grad()
                scheduler.step()
                learnt["counts"][epoch] += _counted(train_loader, ids, ranks)
                if is_slow:  # as long as any time limit of the tests
                    time.sleep(0.05 if cf_manager.global_step < start + BRISK else 1.0)
    if _rank() == 0:
        state = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
        result = {"counts": learnt["counts"].tolist(), "bits": digest(state)}
        _beside(arguments.chk_dir, "result.json").write_text(json.dumps(result))
    if ranks > 1:
        dist.destroy_process_group()


def _counted(loader: CFIterator, ids: torch.Tensor, ranks: int) -> torch.Tensor:
    """How often all ranks together were handed each sample in this batch."""
    weights = loader.last_weights
    used = ids if weights is None else ids[torch.tensor(np.asarray(weights) > 0)]
    counts = torch.bincount(used, minlength=NUM_SAMPLES)
    if ranks > 1:
        dist.all_reduce(counts)
    return counts


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _note(chk_dir: Path, start: int) -> int:
    """Write down that a run began at a step; how many of this rank began before."""
    path = _beside(chk_dir, f"runs.{_rank()}.jsonl")
    before = path.read_text().splitlines() if path.exists() else []
    with path.open("a") as notes:
        notes.write(json.dumps({"start": start}) + "\n")
    return len(before)


def _beside(chk_dir: Path, name: str) -> Path:
    return chk_dir.with_name(f"{chk_dir.name}.{name}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("chk_dir", type=Path)
    parser.add_argument("--slow-runs", type=int, default=0)
    parser.add_argument("--only-signals", action="store_true", help="do not ask SLURM for the end")
    parser.add_argument("--requeue", action="store_true", help="the job, when it was stopped")
    parser.add_argument("--takeover-s", type=float, help="how long to wait for the directory")
    parser.add_argument("--chk-freq", type=int, help="iterations between checkpoints")
    parser.add_argument("--metadata-url", help="where AWS says that the machine goes")
    parser.add_argument("--stop-grace-s", type=float, help="from SIGTERM to the kill")
    parser.add_argument("--mirror", help="a URL; the server is in the environment")
    return parser.parse_args()


if __name__ == "__main__":
    main()
