"""What a process reads from its surroundings: the dataset's length and order, its own rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from iterators.errors import NotResumableError
from iterators.order.epoch import EpochOrder, Order, SequentialOrder


def length_of(dataset: Any) -> int:
    """Number of samples. ``NotResumableError`` if there is no length, ``ValueError`` if it is 0."""
    map_style(dataset)
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise NotResumableError(
            f"{type(dataset).__name__} has no length, so its epochs have no end to count to"
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
            "sample ids that could be ordered. Use ResumableIterableLoader, as CFIterator does"
        )
    return source


def indexed_source(dataset: IterableDataset[Any]) -> Any:
    """The result of the dataset's method ``indexed_source()`` (perhaps itself), or None.

    That the dataset has ``__getitem__`` and ``__len__`` is not enough: they need not return the
    samples of ``__iter__``, and the order of ``__iter__`` (a shuffle, for example) would be lost.
    """
    named = getattr(dataset, "indexed_source", None)
    return named() if callable(named) else None


def sample_order(
    dataset: Any, seed: int, epoch: int, *, shuffle: bool, n: int | None = None
) -> Order:
    """The order of one epoch. If shuffled, the dataset's own ``epoch_order`` if it has one.

    The number of places in such an order may differ from ``n``, the number of samples (default: the
    dataset's length). A seed that cannot be saved is refused even without shuffling.
    """
    shuffled: Order = EpochOrder(length_of(dataset) if n is None else n, seed, epoch)
    if not shuffle:
        return SequentialOrder(shuffled.n)
    if callable(own := getattr(dataset, "epoch_order", None)):
        shuffled = own(seed, epoch)
    return shuffled


def in_process_group() -> bool:
    """Whether torch.distributed is initialized in this process."""
    return dist.is_available() and dist.is_initialized()


def rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """The given rank and world size, checked; else those of the process group; else (0, 1)."""
    if (rank is None) != (world is None):
        raise ValueError(f"give both rank and world size or neither, got {rank} and {world}")
    if rank is None or world is None:
        rank, world = (dist.get_rank(), dist.get_world_size()) if in_process_group() else (0, 1)
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in [0, world), got {rank} of {world}")
    return rank, world
