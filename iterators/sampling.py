"""What a given torch ``DataLoader`` says about its data, in our terms, or why it cannot be said.

Read-only: nothing here iterates a loader or a sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypedDict

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from iterators.errors import IterationStateError, NotResumableError
from iterators.samplers import ResumableDistributedSampler, ResumableSampler
from iterators.surroundings import length_of, why_not_iterable

Tail: TypeAlias = Literal["short", "drop"]

_OURS = (ResumableDistributedSampler, ResumableSampler)
_SHARING = (DistributedSampler, *_OURS)


class LoaderSettings(TypedDict, total=False):
    """``DataLoader`` settings that pass through unchanged; meanings and defaults are torch's."""

    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    pin_memory_device: str
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    prefetch_factor: int | None
    persistent_workers: bool


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a given loader's samplers say, in our terms; None where they say nothing."""

    batch_size: int | None
    tail: Tail = "short"
    shuffle: bool = False
    rank: int | None = None
    world: int | None = None
    seed: int | None = None
    fingerprint: str | None = None


def read_sampling(loader: DataLoader[Any], *, custom_order: bool) -> Sampling:
    """How ``loader`` batches, shuffles and shares; ``NotResumableError`` if that is unknown.

    ``custom_order``: the user replaces the sampler's order, so any sampler will do.
    """
    _require_plain(loader)
    batches = loader.batch_sampler
    if batches is None:
        return _read_sampler(loader, loader.sampler, Sampling(None), custom_order)
    if type(batches) is not BatchSampler:
        raise NotResumableError(
            f"{type(batches).__name__} decides in its own way which samples form a batch, so a "
            "position in our order means nothing to it. Use "
            "ResumableDataLoader(dataset, batch_size, order=lambda seed, epoch: ids)"
        )
    tail: Tail = "drop" if batches.drop_last else "short"
    found = Sampling(batches.batch_size, tail)
    return _read_sampler(loader, batches.sampler, found, custom_order)


def _require_plain(loader: DataLoader[Any]) -> None:
    kind = type(loader)
    changed = (
        kind.__iter__ is not DataLoader.__iter__ and kind.__module__.split(".")[0] != "torchdata"
    )
    if changed:
        raise NotResumableError(
            f"{kind.__name__} overrides DataLoader.__iter__, so what it serves is unknown. "
            "Give its dataset to ResumableDataLoader"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise NotResumableError(why_not_iterable(loader.dataset))
    if not getattr(loader, "in_order", True):
        raise NotResumableError(
            "in_order=False lets batches overtake each other, so counting them says nothing "
            "about which were served. Use in_order=True"
        )


def _read_sampler(
    loader: DataLoader[Any], sampler: Any, found: Sampling, custom_order: bool
) -> Sampling:
    if type(sampler) in _SHARING:
        found = replace(found, rank=sampler.rank, world=sampler.num_replicas)
    if type(sampler) in _OURS:
        found = _read_ours(sampler, found)
    if custom_order:
        return found
    shuffle = _shuffles(sampler)
    if shuffle is None or _covered(sampler) != length_of(loader.dataset):
        raise NotResumableError(
            f"the order of {_described(sampler)} cannot be entered in the middle. Give the same "
            "order as a function: ResumableDataLoader.like(loader, order=lambda seed, epoch: ids); "
            "for a part of a dataset use torch.utils.data.Subset with shuffle=True"
        )
    return replace(found, shuffle=shuffle)


def _read_ours(sampler: ResumableDistributedSampler, found: Sampling) -> Sampling:
    """Its order is also the loader's; its place must still be the start, or it would be lost."""
    if sampler.epoch or sampler.progress:
        raise IterationStateError(
            f"{type(sampler).__name__} stands at sample {sampler.progress} of epoch "
            f"{sampler.epoch}, but CFIterator keeps the place itself. Give it a new sampler, and "
            "load the sampler's state_dict() into the CFIterator"
        )
    tail: Tail = "drop" if sampler.drop_last else found.tail
    identity = sampler.identity
    return replace(found, tail=tail, seed=identity.seed, fingerprint=identity.fingerprint)


def _shuffles(sampler: Any) -> bool | None:
    """Whether a sampler of torch's or ours shuffles; None for one we do not know."""
    if type(sampler) in _SHARING:
        shuffles: bool = sampler.shuffle
        return shuffles
    if type(sampler) is RandomSampler and not sampler.replacement:
        return True
    return False if type(sampler) is SequentialSampler else None


def _covered(sampler: Any) -> int:
    """How many samples a sampler goes through over all ranks."""
    if type(sampler) is RandomSampler:
        return sampler.num_samples
    data: Any = sampler.dataset if type(sampler) in _SHARING else sampler.data_source
    return len(data)


def _described(sampler: Any) -> str:
    if type(sampler) is RandomSampler:
        return (
            f"RandomSampler(replacement={sampler.replacement}, num_samples={sampler.num_samples})"
        )
    known = _shuffles(sampler) is not None
    name = type(sampler).__name__
    return f"{name} over other data than the loader's" if known else f"the custom sampler {name}"


def settings_of(loader: DataLoader[Any]) -> LoaderSettings:
    """Everything about ``loader`` that is not its dataset, its batches or its order."""
    settings: LoaderSettings = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "pin_memory_device": loader.pin_memory_device,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    return settings
