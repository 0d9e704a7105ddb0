"""The default seed of a loader: the one that the script gave to torch, equal on all ranks.

It is the initial seed of the loader's own generator, else of torch's: the argument of
``torch.manual_seed``, or a different number in each process if that was not called. Nothing is
drawn from either generator. Ranks that share the data use the seed of rank 0.
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
    """A seed in [0, 2**64), equal on all ``world`` ranks. All ranks must call this, in one order.

    Raises ``RuntimeError`` if rank 0 does not call it within the timeout of the process group.
    """
    own = torch.initial_seed() if generator is None else generator.initial_seed()
    if world == 1 or not in_process_group():
        return own & _MASK
    return _first_ranks(own & _MASK, rank)


def generator_of(loader: DataLoader[Any]) -> torch.Generator | None:
    """The random generator that was given to ``loader``, or else to its sampler."""
    if loader.generator is not None:
        return loader.generator  # type: ignore[no-any-return]
    found = getattr(loader.sampler, "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _first_ranks(own: int, rank: int) -> int:
    shared: Any = dist.distributed_c10d._get_default_store()
    limit_s = shared.timeout.total_seconds()
    # A clone may be used at the same time as the group's own store.
    store: Any = dist.PrefixStore("iterators", shared.clone())  # type: ignore[attr-defined]
    key = f"seed/{next(_agreed)}"
    # compare_set: under tensor parallelism several processes have rank 0 of the data, and the first
    # of them to come here decides for all.
    if rank == 0:
        return int(store.compare_set(key, "", str(own)))
    end_s, wait_s = time.monotonic() + limit_s, _FIRST_WAIT_S
    while not store.check([key]):
        if time.monotonic() >= end_s:
            raise RuntimeError(
                f"rank {rank} waited {limit_s:g} s (the process group's timeout) for the seed of "
                "this loader from rank 0. All ranks that share the data must make the same "
                "loaders in the same order; or pass seed="
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    return int(store.get(key))
