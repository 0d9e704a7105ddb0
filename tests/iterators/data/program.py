"""A training loop over a loader of another library, with reports of what it does."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from iterators import CFIterator
from iterators.testing import digest
from tests.acceptance.ranks import Rank
from tests.iterators.data.sources import make

EPOCHS = 2


def train(here: Rank) -> None:
    """One life."""
    warnings.simplefilter("ignore")  # of the libraries, such as of files left open
    here.send("begun", here.rank)
    kind, workers = here.settings["kind"], here.settings["workers"]
    torch.manual_seed(here.rank)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    if here.world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    config = CFConfig(**here.settings.get("config", {}))
    with CFManager(here.chk_dir, chk, mode=CFMode.MANUAL, chk_freq=1, config=config) as manager:
        folder = here.life.folder.parent
        loader = make(kind, folder, rank=here.rank, world=here.world, workers=workers)
        batches = CFIterator(loader, seed=5, cf_manager=manager)
        manager.restore()
        here.send("restored", manager.global_step if manager.stats()["restored_step"] else 0)
        for epoch in batches.epochs(EPOCHS):
            for batch in batches:
                loss = (model(batch["x"]) - batch["x"][:, :1]).square().mean()
                loss.backward()
                data = (epoch, batch["id"].tolist(), digest(batch), loss.item())
                here.send("event", "batch", manager.global_step, data)
                manager.weight_update()
                optimizer.zero_grad()
                _keep_up(manager, alone=here.world == 1)
    states = [model.state_dict(), optimizer.state_dict()["state"], torch.get_rng_state()]
    here.send("end", [digest(one) for one in states])


def _keep_up(manager: CFManager, *, alone: bool) -> None:
    """A run so short would be over before there is something to resume."""
    if not alone:  # all ranks wait, or none: what is in flight is not the same on each
        if manager.global_step % 3 == 0:
            manager.wait()
        return
    if manager.global_step - (manager.latest_step() or 0) <= 2:
        return
    if manager.stats()["num_in_flight"]:
        manager.wait()
    else:  # none was taken: the slots are still being prepared
        manager.save()
