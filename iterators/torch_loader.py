"""Map-style torch datasets in our order: enterable anywhere, at any layout, to the same bits.

``ResumableDataLoader`` runs a plain ``torch.utils.data.DataLoader`` over our batch sampler with
a private generator (``iter(DataLoader)`` otherwise draws from the default one, and dropout
shifts after a resume). ``ResumableDataLoader.like`` rebuilds a given loader with all its other
settings, or says why it cannot. Training process only; one open epoch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)
from torch.utils.data.distributed import DistributedSampler

from iterators.errors import NotResumableError
from iterators.fingerprint import dataset_fingerprint
from iterators.order import EpochOrder, Int64, ListedOrder, Order, SequentialOrder, fold64
from iterators.position import Identity, Layout
from iterators.protocol import Delivery
from iterators.tickets import (
    Delivered,
    Seeding,
    Share,
    TicketCollate,
    TicketDataset,
    TicketSampler,
)

#: The user's own order: ``(seed, epoch) -> ids``, the same for the same arguments, always.
OrderFunction: TypeAlias = Callable[[int, int], Sequence[int] | Int64]
Tail: TypeAlias = Literal["short", "drop"]

_VERSIONS = (("numpy", np.__version__), ("torch", str(torch.__version__)))
_GENERATORS = ("torch", "python", "numpy")


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


class ResumableDataLoader:
    """A ``DataLoader`` over a map-style dataset that ``CFIterator`` can enter anywhere.

    ``batch_size`` is per rank; None delivers single samples, uncollated. ``shuffle`` permutes by
    (``seed``, epoch); ``order``, a function (seed, epoch) -> ids of constant length, replaces
    both orders. ``tail="short"`` shares the last, partial batch evenly, so that every sample is
    served once; a rank with nothing left gets one sample of weight 0 (``CFIterator.last_weights``:
    multiply the per-sample loss by it). ``tail="drop"`` does not serve it: not exactly-once.
    ``rank`` and ``world`` are the process group's unless given. ``seeded`` names the generators
    ("torch", "python", "numpy") set for each sample from (seed, epoch, id), about 10 us each but
    torch's. ``fingerprint`` names the data where ``dataset_fingerprint`` cannot tell. All other
    settings are ``DataLoader``'s.

    Raises ``NotResumableError`` for an ``IterableDataset``, ``ValueError`` for settings that
    contradict each other.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        order: OrderFunction | None = None,
        tail: Tail = "short",
        rank: int | None = None,
        world: int | None = None,
        seeded: Collection[str] = _GENERATORS,
        fingerprint: str | None = None,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        self._share = _share(batch_size, tail, rank, world)
        self._shuffle, self._function, self._seed = shuffle, order, seed
        self._num_samples = _length(dataset)
        self._current = self._make_order(0)
        self._identity = Identity(
            self._current.algorithm,
            self._current.n,
            dataset_fingerprint(dataset) if fingerprint is None else fingerprint,
            seed,
            tail,
        )
        if not self._share.batches(self._identity.n):
            raise ValueError(
                f"tail='drop' would serve nothing: {self._identity.n} samples make no whole "
                f"batch of {self._share.global_batch}"
            )
        self._epoch = 0
        self._seeding = _seeding(seed, seeded)
        self._sampler = TicketSampler(self._current, self._share)
        self._generator = torch.Generator()
        self._dataset, self._single, self._settings = dataset, batch_size is None, settings
        self._engine = self._make_engine()

    @classmethod
    def like(
        cls,
        loader: DataLoader[Any],
        *,
        seed: int = 0,
        order: OrderFunction | None = None,
        seeded: Collection[str] = _GENERATORS,
        fingerprint: str | None = None,
    ) -> ResumableDataLoader:
        """Rebuild ``loader`` with all its settings, over our order instead of its sampler.

        Raises ``NotResumableError`` with the reason where that would change what it serves; a
        custom sampler can be replaced by ``order``.
        """
        found = _read_sampling(loader, custom_order=order is not None)
        return cls(
            loader.dataset,
            found.batch_size,
            shuffle=found.shuffle,
            seed=seed,
            order=order,
            tail=found.tail,
            rank=found.rank,
            world=found.world,
            seeded=seeded,
            fingerprint=fingerprint,
            **_settings_of(loader),
        )

    @property
    def identity(self) -> Identity:
        """What must agree when a position is restored."""
        return self._identity

    @property
    def layout(self) -> Layout:
        """How the data is spread now."""
        workers = self._engine.num_workers
        return Layout(self._share.world, self._share.batch, workers, versions=_VERSIONS)

    @property
    def rank(self) -> int:
        """This process's rank among those that share the data."""
        return self._share.rank

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        return self._share.batches(self._identity.n)

    def batches_left(self, start: int) -> int:
        """Batches from place ``start`` to the end of an epoch."""
        return self._share.batches(self._identity.n - start)

    def order(self, epoch: int) -> Order:
        """The order of ``epoch``; the last one asked for is kept."""
        if epoch != self._epoch:
            self._current, self._epoch = self._make_order(epoch), epoch
            if self._current.n != self._identity.n:
                raise ValueError(
                    f"order(seed, epoch) must have one length: {self._identity.n} ids in epoch 0, "
                    f"{self._current.n} in epoch {epoch}"
                )
        return self._current

    def open(self, *, epoch: int, start: int) -> TorchDeliveries:
        """Start an epoch at place ``start``; workers begin to load, nothing is fetched here."""
        self._sampler.aim(self.order(epoch), epoch=epoch, start=start)
        self._generator.manual_seed(fold64(self._seed, epoch) & ((1 << 63) - 1))
        guard = self._seeding if self._engine.num_workers == 0 else None
        span = (start, self._identity.n, self._share.global_batch)
        return TorchDeliveries(iter(self._engine), span=span, guard=guard)

    def close(self) -> None:
        """End persistent workers; the next ``open`` starts new ones."""
        if self._engine.persistent_workers:
            self._engine = self._make_engine()

    def _make_order(self, epoch: int) -> Order:
        if self._function is not None:
            return ListedOrder(self._function(self._seed, epoch), num_samples=self._num_samples)
        if self._shuffle:
            return EpochOrder(self._num_samples, self._seed, epoch)
        return SequentialOrder(self._num_samples)

    def _make_engine(self) -> DataLoader[Delivered]:
        collate = self._settings.get("collate_fn") or (
            default_convert if self._single else default_collate
        )
        ours: Any = {**self._settings, "collate_fn": TicketCollate(collate, self._single)}
        return DataLoader(
            TicketDataset(self._dataset, self._seeding),  # type: ignore[arg-type]
            batch_sampler=self._sampler,
            generator=self._generator,
            **ours,
        )


class TorchDeliveries:
    """One opened epoch of a torch loader. ``guard`` protects the caller's generators."""

    def __init__(
        self, batches: Iterator[Delivered], *, span: tuple[int, int, int], guard: Seeding | None
    ) -> None:
        self._batches: Iterator[Delivered] | None = batches
        self._place, self._stop, self._stride = span
        self._guard = guard

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        if self._batches is None:
            raise StopIteration
        ids, weights, data = self._fetch(self._batches)
        self._place = min(self._place + self._stride, self._stop)
        return Delivery(
            data,
            self._place,
            np.frombuffer(ids, dtype=np.int64),
            np.frombuffer(weights, dtype=np.float32),
        )

    def _fetch(self, batches: Iterator[Delivered]) -> Delivered:
        if self._guard is None:
            return next(batches)
        with self._guard.caller_kept():
            return next(batches)

    def close(self) -> None:
        """Let go of the loader's iterator, which ends workers that are not persistent."""
        self._batches = None


@dataclass(frozen=True, slots=True)
class _Sampling:
    """What a given loader's samplers say, in our terms."""

    batch_size: int | None
    tail: Tail = "short"
    shuffle: bool = False
    rank: int | None = None
    world: int | None = None


def _read_sampling(loader: DataLoader[Any], *, custom_order: bool) -> _Sampling:
    _require_plain(loader)
    batches = loader.batch_sampler
    if batches is None:
        return _read_sampler(loader, loader.sampler, _Sampling(None), custom_order)
    if type(batches) is not BatchSampler:
        raise NotResumableError(
            f"{type(batches).__name__} decides in its own way which samples form a batch, so a "
            "position in our order means nothing to it. Use "
            "ResumableDataLoader(dataset, batch_size, order=lambda seed, epoch: ids)"
        )
    tail: Tail = "drop" if batches.drop_last else "short"
    found = _Sampling(batches.batch_size, tail)
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
        raise NotResumableError(_iterable(loader.dataset))
    if not getattr(loader, "in_order", True):
        raise NotResumableError(
            "in_order=False lets batches overtake each other, so counting them says nothing "
            "about which were served. Use in_order=True"
        )


def _read_sampler(
    loader: DataLoader[Any], sampler: Any, found: _Sampling, custom_order: bool
) -> _Sampling:
    if custom_order:
        return found
    if type(sampler) is DistributedSampler:
        shared = replace(found, rank=sampler.rank, world=sampler.num_replicas)
        return replace(shared, shuffle=sampler.shuffle)
    if type(sampler) is SequentialSampler:
        return found
    whole = type(sampler) is RandomSampler and not sampler.replacement
    if whole and sampler.num_samples == _length(loader.dataset):
        return replace(found, shuffle=True)
    raise NotResumableError(
        f"the order of {_described(sampler)} cannot be entered in the middle. Give the same order "
        "as a function: ResumableDataLoader.like(loader, order=lambda seed, epoch: ids); for a "
        "part of a dataset use torch.utils.data.Subset with shuffle=True"
    )


def _described(sampler: Any) -> str:
    if type(sampler) is RandomSampler:
        return (
            f"RandomSampler(replacement={sampler.replacement}, num_samples={sampler.num_samples})"
        )
    return f"the custom sampler {type(sampler).__name__}"


def _settings_of(loader: DataLoader[Any]) -> LoaderSettings:
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


def _share(batch_size: int | None, tail: str, rank: int | None, world: int | None) -> Share:
    if tail not in ("short", "drop"):
        raise ValueError(f"tail must be 'short' or 'drop', got {tail!r}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if (rank is None) != (world is None):
        raise ValueError(f"give both rank and world or neither, got {rank} and {world}")
    if rank is None or world is None:
        grouped = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in [0, world), got {rank} of {world}")
    return Share(batch_size or 1, world, rank, tail)


def _seeding(seed: int, seeded: Collection[str]) -> Seeding:
    unknown = set(seeded) - set(_GENERATORS)
    if unknown or isinstance(seeded, str):
        raise ValueError(f"seeded is a collection of {_GENERATORS}, got {seeded!r}")
    return Seeding(seed, *(name in seeded for name in _GENERATORS))


def _length(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset):
        raise NotResumableError(_iterable(dataset))
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise NotResumableError(
            f"{type(dataset).__name__} has no length, so there is no epoch to be in"
        ) from error
    if not length:
        raise ValueError(f"{type(dataset).__name__} is empty")
    return length


def _iterable(dataset: Any) -> str:
    return (
        f"{type(dataset).__name__} is an IterableDataset: it has no sample ids to continue at, "
        "and resuming iterable datasets exactly is not built yet. exact=False replays it"
    )
