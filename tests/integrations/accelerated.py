"""A loop that is written with accelerate's ``Accelerator``, with reports of what it does."""

from __future__ import annotations

import os
import random
import warnings

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, default_collate

from checkfreq import CFConfig, CFManager, CFMode
from checkfreq.integrations.accelerate import AcceleratedIterator, checkpoint_of
from iterators import isolated_rng
from iterators.testing import digest
from tests.acceptance.ranks import Rank
from tests.integrations.learning import Language, Sentences

EPOCHS = 3
ACCUMULATE = 3


class Losses:
    """A state of the user's own, registered with the accelerator."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, float]:
        """The sum of all losses."""
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue to add."""
        self.total = state["total"]


def train(here: Rank) -> None:
    """One life."""
    warnings.simplefilter("default")  # the libraries' own are no business of ours
    here.send("begun", here.rank)
    if here.world > 1:
        ranks = {"RANK": here.rank, "WORLD_SIZE": here.world, "LOCAL_WORLD_SIZE": here.world}
        os.environ.update({n: str(v) for n, v in {**ranks, "LOCAL_RANK": here.rank}.items()})
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    losses = Losses()
    accelerator.register_for_checkpointing(losses)
    # Of each rank its own, as the random generators.
    chk = checkpoint_of(accelerator, per_rank=["registered"])
    config = CFConfig(verify_settled=True, **here.settings.get("config", {}))
    with CFManager(here.chk_dir, chk, mode=CFMode.MANUAL, chk_freq=1, config=config) as manager:
        loader = DataLoader(Sentences(), batch_size=4, shuffle=True)
        batches = AcceleratedIterator(loader, accelerator, cf_manager=manager, seed=3)
        manager.restore()
        here.send("restored", manager.global_step if manager.stats()["restored_step"] else 0)
        for epoch in batches.epochs(EPOCHS):
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    accelerator.backward(loss)
                    data = (epoch, batch["input_ids"][:, 0].tolist(), loss.item())
                    here.send("event", "batch", manager.global_step, data)
                    losses.total += loss.item()
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            with isolated_rng(), torch.no_grad():
                model.eval()
                loss = model(**default_collate([Sentences(5, is_random=False)[epoch]]))["loss"]
                here.send("event", "validation", manager.global_step, loss.item())
                model.train()
    generators = [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]
    states = [model.state_dict(), optimizer.state_dict()["state"], scheduler.state_dict()]
    here.send("end", [digest(one) for one in (*states, generators)], losses.total)
