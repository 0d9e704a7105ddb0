"""Data loading that resumes exactly: each sample once per epoch, in one order, at any layout.

``CFIterator`` wraps a loader and keeps track of the position of training in it.
``ResumableDataLoader`` is torch's ``DataLoader`` with an order that can be entered at any sample,
``ResumableIterableLoader`` the one for iterable datasets, ``ResumableNodeLoader`` for nodes of
torchdata. ``ShuffledStream`` shuffles a stream. The resumable samplers are drop-in
replacements for torch's. ``ShardedDataset`` reads shards sequentially, ``ResidentDataset`` holds a
rank's share of the data in memory. ``isolated_rng`` keeps validation from changing the random
numbers of training. Names are loaded on first use, so importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iterators.cf_iterator import CFIterator
    from iterators.errors import (
        CorruptPositionError,
        IterationStateError,
        NotResumableError,
        ResumeMismatchError,
        TrainingStopped,
    )
    from iterators.loop.isolation import isolated_rng
    from iterators.order.epoch import EpochOrder
    from iterators.order.ledger import Ledger
    from iterators.order.position import Position
    from iterators.torch.grouped import ResumableGroupedBatchSampler
    from iterators.torch.iterable import ResumableIterableLoader
    from iterators.torch.loader import ResumableDataLoader
    from iterators.torch.nodes import ResumableNodeLoader
    from iterators.torch.resident import ResidentDataset
    from iterators.torch.samplers import ResumableDistributedSampler, ResumableSampler
    from iterators.torch.shards import ShardedDataset
    from iterators.torch.shuffled import ShuffledStream

__all__ = [
    "CFIterator",
    "CorruptPositionError",
    "EpochOrder",
    "IterationStateError",
    "Ledger",
    "NotResumableError",
    "Position",
    "ResidentDataset",
    "ResumableDataLoader",
    "ResumableDistributedSampler",
    "ResumableGroupedBatchSampler",
    "ResumableIterableLoader",
    "ResumableNodeLoader",
    "ResumableSampler",
    "ResumeMismatchError",
    "ShardedDataset",
    "ShuffledStream",
    "TrainingStopped",
    "isolated_rng",
]

_HOME = {
    "CFIterator": "cf_iterator",
    "EpochOrder": "order.epoch",
    "Ledger": "order.ledger",
    "Position": "order.position",
    "ResidentDataset": "torch.resident",
    "ResumableDataLoader": "torch.loader",
    "ResumableDistributedSampler": "torch.samplers",
    "ResumableGroupedBatchSampler": "torch.grouped",
    "ResumableSampler": "torch.samplers",
    "ResumableIterableLoader": "torch.iterable",
    "ResumableNodeLoader": "torch.nodes",
    "ShardedDataset": "torch.shards",
    "ShuffledStream": "torch.shuffled",
    "isolated_rng": "loop.isolation",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"iterators.{_HOME.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
