"""The seed of a loader that was given none: what the script seeded torch with, on all ranks.

It is the initial seed of the loader's own generator, else of torch's: what ``torch.manual_seed``
was called with, or another one in each process. Nothing is drawn from either. Ranks that share the
data take the first one's.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from iterators.order.environment import in_process_group

_MASK = (1 << 64) - 1
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.05

_agreed = itertools.count()


def default_seed(generator: torch.Generator | None = None, *, rank: int, world: int) -> int:
    """A seed in [0, 2**64), equal on all ``world`` ranks: each has to ask, in the same order.

    ``RuntimeError`` where the first of them does not ask within the process group's timeout.
    """
    own = torch.initial_seed() if generator is None else generator.initial_seed()
    if world == 1 or not in_process_group():
        return own & _MASK
    return _first_ranks(own & _MASK, rank)


def generator_of(loader: DataLoader[Any]) -> torch.Generator | None:
    """The one that was given to ``loader``, or else to its sampler."""
    if loader.generator is not None:
        return loader.generator  # type: ignore[no-any-return]
    found = getattr(loader.sampler, "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _first_ranks(own: int, rank: int) -> int:
    shared: Any = dist.distributed_c10d._get_default_store()
    limit_s = shared.timeout.total_seconds()
    store: Any = dist.PrefixStore("iterators", shared.clone())  # type: ignore[attr-defined]
    key = f"seed/{next(_agreed)}"
    if rank == 0:  # of several that share a rank of the data (tensor parallel), the quickest
        return int(store.compare_set(key, "", str(own)))
    end_s, wait_s = time.monotonic() + limit_s, _FIRST_WAIT_S
    while not store.check([key]):
        if time.monotonic() >= end_s:
            raise RuntimeError(
                f"rank {rank} waited {limit_s:g} s (the process group's timeout) for the seed that "
                "rank 0 gives to this loader. Every rank that shares the data makes the same "
                "loaders, in the same order; or pass seed="
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    return int(store.get(key))
