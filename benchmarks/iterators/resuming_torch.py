"""The torch arms of the resume table: ours, torchdata's and accelerate's."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.iterators.resuming_shared import BATCH, Numbers, Resume, entering, require_memory
from iterators import ResumableDataLoader


def ours(n: int, batches: int, *, workers: int) -> Resume:
    """Our order under a plain DataLoader."""
    return entering(
        lambda: ResumableDataLoader(Numbers(n), BATCH, shuffle=True, num_workers=workers), batches
    )


def stateful(n: int, batches: int) -> Resume:
    """torchdata's loader and its own state."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    require_memory(n)

    def make() -> Any:
        return StatefulDataLoader(Numbers(n), BATCH, shuffle=True)

    loader = make()
    served = iter(loader)
    for _ in range(batches):
        next(served)
    state = loader.state_dict()
    del served

    def resume() -> tuple[object, object]:
        fresh = make()
        fresh.load_state_dict(state)
        served = iter(fresh)
        return next(served), served

    return resume


def skipping(n: int, batches: int) -> Resume:
    """accelerate's loader, which skips the first batches."""
    from accelerate import skip_first_batches

    require_memory(n)

    def resume() -> tuple[object, object]:
        generator = torch.Generator().manual_seed(0)
        loader = DataLoader(Numbers(n), BATCH, shuffle=True, generator=generator)
        served = iter(skip_first_batches(loader, batches))
        return next(served), served

    return resume
