"""Reads from a torch ``DataLoader`` how it batches, shuffles and splits its data.

Refuses a loader whose order cannot be rebuilt, with the reason. Read-only: nothing here iterates
over a loader or a sampler.
"""

from __future__ import annotations

import logging
import sys
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
from iterators.order.environment import length_of
from iterators.torch.drawn import DrawnOrder, can_be_drawn, drawing
from iterators.torch.samplers import ResumableDistributedSampler, ResumableSampler

logger = logging.getLogger(__name__)

Tail: TypeAlias = Literal["short", "drop"]

_OURS = (ResumableDistributedSampler, ResumableSampler)

#: Members of ``DataLoader`` that decide what it serves (private ones of torch among them): a
#: subclass that overrides one may serve anything.
_SERVING = ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")


class LoaderSettings(TypedDict, total=False):
    """``DataLoader`` settings that are passed on; torch's meanings and defaults."""

    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    pin_memory_device: str
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    prefetch_factor: int | None
    persistent_workers: bool
    snapshot_every_n_steps: int  # StatefulDataLoader's; its snapshots are not used


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings found in a loader and its samplers; None where they do not say.

    ``order`` draws the indices of a sampler whose order has no formula. ``tail`` follows from the
    ``drop_last`` of the batches. The ``drop_last`` of a sampler only
    evens out the ranks, which our tail does as well; see ``_log_kept``.
    """

    batch_size: int | None
    tail: Tail = "short"
    seed: int | None = None
    shuffle: bool = False
    rank: int | None = None
    world: int | None = None
    fingerprint: str | None = None
    order: Callable[[int, int], DrawnOrder] | None = None


def read_sampling(loader: DataLoader[Any], *, seed: int | None, custom_order: bool) -> Sampling:
    """How ``loader`` batches, shuffles and splits; ``NotResumableError`` if that is unknown.

    ``seed`` overrides that of torch's samplers; ``ValueError`` if it differs from that of one of
    our samplers. ``custom_order``: the user replaces the sampler's order, so any sampler will do.
    """
    require_plain(loader)
    if isinstance(loader.dataset, IterableDataset):
        return Sampling(loader.batch_size, tail_of(loader), seed)
    batches: Any = loader.batch_sampler
    if batches is None:
        found = Sampling(None, seed=seed)
        return _read_sampler(loader, loader.sampler, found, custom_order)
    has_size = custom_order and isinstance(batches, BatchSampler) and batches.batch_size
    if not has_size and not _is_a(batches, BatchSampler):
        raise NotResumableError(
            f"the batch sampler {type(batches).__name__} decides by its own rules which samples "
            "form a batch, so it cannot be started in the middle of an epoch. Give the order of "
            "the samples as a function instead, and batch_size of them in a row form a batch: "
            "order=lambda seed, epoch: ids, of ResumableDataLoader(dataset, batch_size, ...) or "
            "transformers' CheckFreqCallback"
        )
    found = Sampling(batches.batch_size, tail_of(batches), seed)
    return _read_sampler(loader, batches.sampler, found, custom_order)


def tail_of(batching: Any) -> Tail:
    """The tail policy that corresponds to ``drop_last``."""
    return "drop" if batching.drop_last else "short"


def engine_of(loader: DataLoader[Any]) -> type[DataLoader[Any]]:
    """torchdata's ``StatefulDataLoader`` if ``loader`` is one, else torch's ``DataLoader``."""
    stateful = _torchdatas("StatefulDataLoader")
    return stateful if stateful is not None and isinstance(loader, stateful) else DataLoader


def _torchdatas(name: str) -> Any:
    """A class of torchdata; None if torchdata is not imported, so no object can be of it."""
    for module in ("torchdata.stateful_dataloader", "torchdata.stateful_dataloader.sampler"):
        if hasattr(sys.modules.get(module), name):
            return getattr(sys.modules[module], name)
    return None


def _is_a(sampler: object, kind: type) -> bool:
    """Whether ``sampler`` serves as torch's ``kind`` does, or is torchdata's replacement for it.

    A subclass serves alike if it has the ``__iter__`` of ``kind``.
    """
    names: dict[type, str] = {DistributedSampler: "StatefulDistributedSampler"}
    if type(sampler) is _torchdatas(names.get(kind, kind.__name__)):
        return True
    return isinstance(sampler, kind) and getattr(type(sampler), "__iter__", 0) is kind.__iter__  # type: ignore[attr-defined]


def _shares(sampler: object) -> bool:
    """Whether ``sampler`` splits the samples among ranks."""
    return type(sampler) in _OURS or _is_a(sampler, DistributedSampler)


def require_plain(loader: DataLoader[Any]) -> None:
    """``NotResumableError`` if ``loader`` may serve other batches than a plain ``DataLoader``."""
    kind, engine = type(loader), engine_of(loader)
    for name in _SERVING:
        if getattr(kind, name, None) is not getattr(engine, name, None):
            raise NotResumableError(
                f"{kind.__name__} overrides DataLoader.{name}, so what it serves is unknown. "
                "Give its dataset to ResumableDataLoader"
            )
    if not getattr(loader, "in_order", True):
        raise NotResumableError(
            "with in_order=False batches overtake one another, so their number does not tell which "
            "ones were served. Use in_order=True"
        )


def _read_sampler(
    loader: DataLoader[Any], sampler: Any, found: Sampling, custom_order: bool
) -> Sampling:
    if type(sampler) in _OURS:
        found = _read_ours(sampler, found)
    if _shares(sampler):
        seed = _seed_of(sampler) if found.seed is None else found.seed
        found = replace(found, rank=sampler.rank, world=sampler.num_replicas, seed=seed)
    if custom_order:
        return found
    shuffle, num_samples = _shuffles(sampler), length_of(loader.dataset)
    if shuffle is None or _covered(sampler) != num_samples:
        if can_be_drawn(sampler) or _is_a(sampler, RandomSampler):
            return replace(found, order=drawing(sampler, num_samples))
        raise NotResumableError(
            f"the order of {_described(sampler)} cannot be entered in the middle. Give the same "
            "order as a function: order=lambda seed, epoch: ids, of ResumableDataLoader.like("
            "loader, ...) or transformers' CheckFreqCallback; to train on part of a dataset, use "
            "torch.utils.data.Subset with shuffle=True"
        )
    if _shares(sampler) and found.tail == "short":
        _log_kept(sampler)
    return replace(found, shuffle=shuffle)


def _seed_of(sampler: Any) -> int | None:
    """The seed of a sampler; None for torch's default of 0, which nobody has chosen."""
    seed: int = sampler.seed
    return seed if type(sampler) in _OURS else seed or None


def _log_kept(sampler: Any) -> None:
    """Log that samples are served which the sampler's ``drop_last`` would have left out."""
    n = len(sampler.dataset)
    left_out = n % sampler.num_replicas
    if sampler.drop_last and left_out:
        logger.info(
            "all %d samples of an epoch are served; %s(drop_last=True) alone would serve %d. The "
            "last batch is shared evenly among the ranks; the DataLoader's drop_last=True drops it",
            n,
            type(sampler).__name__,
            n - left_out,
        )


def _read_ours(sampler: ResumableDistributedSampler, found: Sampling) -> Sampling:
    """Settings of one of our samplers, which must be at its start: its place is not taken over."""
    if sampler.epoch or sampler.progress:
        raise IterationStateError(
            f"{type(sampler).__name__} is at sample {sampler.progress} of epoch "
            f"{sampler.epoch}, but CFIterator keeps the place itself. Give it a new sampler, and "
            "load this one's state_dict() into the CFIterator"
        )
    if found.seed not in (None, sampler.seed):
        raise ValueError(f"seed is {found.seed} here and {sampler.seed} in the loader's sampler")
    return replace(found, fingerprint=sampler.identity.fingerprint)


def _shuffles(sampler: Any) -> bool | None:
    """Whether one of torch's samplers or of ours shuffles; None for any other sampler."""
    if _shares(sampler):
        return bool(sampler.shuffle)
    if _is_a(sampler, RandomSampler) and not sampler.replacement:
        return True
    return False if _is_a(sampler, SequentialSampler) else None


def _covered(sampler: Any) -> int:
    """How many samples a sampler serves over all ranks."""
    if _is_a(sampler, RandomSampler):
        return int(sampler.num_samples)
    data: Any = sampler.dataset if _shares(sampler) else sampler.data_source
    return len(data)


def _described(sampler: Any) -> str:
    known = _shuffles(sampler) is not None
    name = type(sampler).__name__
    return f"{name} over other data than the loader's" if known else f"the custom sampler {name}"


def settings_of(loader: DataLoader[Any]) -> LoaderSettings:
    """All settings of ``loader`` but its dataset, batches and order."""
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
    snapshots = getattr(loader, "snapshot_every_n_steps", None)
    if snapshots is not None:
        settings["snapshot_every_n_steps"] = snapshots
    return settings
