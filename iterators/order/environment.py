"""What a process finds before it shares out data: how much, in what order, and its own rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from iterators.errors import NotResumableError
from iterators.order.epoch import EpochOrder, Order, SequentialOrder


def length_of(dataset: Any) -> int:
    """Number of samples; refuses a dataset that has none or cannot say."""
    map_style(dataset)
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise NotResumableError(
            f"{type(dataset).__name__} has no length, so there is no epoch to be in"
        ) from error
    if not length:
        raise ValueError(f"{type(dataset).__name__} is empty")
    return length


def map_style(dataset: Any) -> Any:
    """``dataset``, or the map-style source of an iterable one; ``NotResumableError`` if none."""
    if not isinstance(dataset, IterableDataset):
        return dataset
    source = indexed_source(dataset)
    if source is None:
        raise NotResumableError(
            f"{type(dataset).__name__} is an IterableDataset without indexed_source(): it has no "
            "sample ids to put in an order. Use ResumableIterableLoader, as CFIterator does"
        )
    return source


def indexed_source(dataset: IterableDataset[Any]) -> Any:
    """What the dataset's method ``indexed_source()`` returns (itself, perhaps); None without one.

    Methods ``__getitem__`` and ``__len__`` alone promise nothing: they need not give the samples
    that ``__iter__`` does, and its order, a shuffle for example, would be lost.
    """
    named = getattr(dataset, "indexed_source", None)
    return named() if callable(named) else None


def sample_order(dataset: Any, seed: int, epoch: int, *, shuffle: bool) -> Order:
    """The order of one epoch: shuffled, it is the dataset's own ``epoch_order`` if it has one.

    A dataset's own order may have another number of places than there are samples, if all epochs
    have the same. A seed that could not be saved is refused in any case.
    """
    shuffled: Order = EpochOrder(length_of(dataset), seed, epoch)
    if not shuffle:
        return SequentialOrder(shuffled.n)
    if callable(own := getattr(dataset, "epoch_order", None)):
        shuffled = own(seed, epoch)
    return shuffled


def in_process_group() -> bool:
    """Whether this process is a rank of an initialized process group."""
    return dist.is_available() and dist.is_initialized()


def rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """The given pair, checked, or the process group's; (0, 1) where there is none."""
    if (rank is None) != (world is None):
        raise ValueError(f"give both rank and world size or neither, got {rank} and {world}")
    if rank is None or world is None:
        rank, world = (dist.get_rank(), dist.get_world_size()) if in_process_group() else (0, 1)
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in [0, world), got {rank} of {world}")
    return rank, world
