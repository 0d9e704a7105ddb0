"""A training script that saves by itself, with torch.save: clean, or with one planted fault.

python plain.py FOLDER [FAULT]
"""

import copy
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(sys.argv[1])
FAULT = sys.argv[2] if len(sys.argv) > 2 else ""
RANKS, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
EPOCHS, BATCHES, EVERY = 3, 20, 3
LATEST = FOLDER / "latest.pt"


def save(state: dict) -> None:
    """Whole or not at all; with the fault, over the only checkpoint there is."""
    if RANK:
        return
    if FAULT == "non-durable-save":
        torch.save(state, LATEST)
        return
    with open(FOLDER / "next", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(FOLDER / "next", LATEST)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(BATCHES * 8, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :3].argmax(1))
    network = model
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
        network = nn.parallel.DistributedDataParallel(model)
    first_epoch = first_batch = 0
    if LATEST.exists():
        state = torch.load(LATEST, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, first_batch = state["epoch"], state["batch"]
        torch.set_rng_state(state["rng"])
    shuffle = torch.Generator().manual_seed(3)
    pending, counted = None, 0
    for epoch in range(first_epoch, EPOCHS):
        if FAULT != "reused-seed":
            shuffle.manual_seed(epoch)
        loader = DataLoader(data, batch_size=8, shuffle=True, generator=shuffle)
        if FAULT == "no-loader":
            rows = torch.randperm(len(x), generator=shuffle).split(8)
            loader = [data[indices] for indices in rows]
        for batch, (images, labels) in enumerate(loader):
            if epoch == first_epoch and batch < first_batch:
                continue
            nn.functional.cross_entropy(network(images), labels).backward()
            if pending is not None:  # the copy of the last step is written while this one runs
                save(pending)
                pending = None
            optimizer.step()
            optimizer.zero_grad()
            counted += 1
            if counted % EVERY and batch != BATCHES - 1:
                continue
            is_over = batch == BATCHES - 1
            done = counted % BATCHES if FAULT == "position-by-batch-count" else batch + 1
            state = {
                "model": model.state_dict(),
                "optimizer": copy.deepcopy(optimizer.state_dict()),
                "epoch": epoch + is_over,
                "batch": 0 if is_over else done,
                "rng": torch.get_rng_state(),
            }
            if FAULT == "torn-copy":
                weights = {name: p.detach().clone() for name, p in model.named_parameters()}
                state["model"] = {**state["model"], **weights}  # the buffers are not copied
                pending = state
            else:
                save(state)
        if FAULT == "training-flag":
            model.eval()
    if pending is not None:
        save(pending)
    print("done", flush=True)


main()
