"""Map-style torch datasets in our order: enterable anywhere, at any layout, to the same bits.

``ResumableDataLoader`` runs a plain ``torch.utils.data.DataLoader`` over our batch sampler with
a private generator (``iter(DataLoader)`` otherwise draws from the default one, and dropout
shifts after a resume). ``ResumableDataLoader.like`` rebuilds a given loader with all its other
settings, or says why it cannot. Training process only; one open epoch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias, Unpack

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    default_collate,
    default_convert,
)

from iterators.fingerprint import dataset_fingerprint, sample_name
from iterators.order import EpochOrder, Int64, ListedOrder, Order, SequentialOrder, fold64
from iterators.position import Identity, Layout
from iterators.protocol import Adapter, Delivery
from iterators.sampling import LoaderSettings, Tail, read_sampling, settings_of
from iterators.surroundings import length_of, rank_and_world
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

_VERSIONS = (("numpy", np.__version__), ("torch", str(torch.__version__)))
_GENERATORS = ("torch", "python", "numpy")


class ResumableDataLoader(Adapter):
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
        self._num_samples = length_of(dataset)
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
        seed: int | None = None,
        order: OrderFunction | None = None,
        seeded: Collection[str] = _GENERATORS,
        fingerprint: str | None = None,
    ) -> ResumableDataLoader:
        """Rebuild ``loader`` with all its settings, over our order instead of its sampler.

        ``seed`` is that of a sampler of ours (``ValueError`` for another one), 0 where there is
        none. Raises ``NotResumableError`` with the reason where rebuilding would change what is
        served; a custom sampler can be replaced by ``order``.
        """
        found = read_sampling(loader, custom_order=order is not None)
        if None not in (seed, found.seed) and seed != found.seed:
            raise ValueError(f"seed is {seed} here and {found.seed} in the loader's sampler")
        return cls(
            loader.dataset,
            found.batch_size,
            shuffle=found.shuffle,
            seed=seed or found.seed or 0,
            order=order,
            tail=found.tail,
            rank=found.rank,
            world=found.world,
            seeded=seeded,
            fingerprint=found.fingerprint if fingerprint is None else fingerprint,
            **settings_of(loader),
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

    def name_of(self, sample: int) -> str:
        """The sample's path, for a dataset that lists its files."""
        return sample_name(self._dataset, sample)

    def open(self, *, epoch: int, start: int, state: Any = None) -> TorchDeliveries:
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


def _share(batch_size: int | None, tail: str, rank: int | None, world: int | None) -> Share:
    if tail not in ("short", "drop"):
        raise ValueError(f"tail must be 'short' or 'drop', got {tail!r}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    rank, world = rank_and_world(rank, world)
    return Share(batch_size or 1, world, rank, tail)


def _seeding(seed: int, seeded: Collection[str]) -> Seeding:
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must lie in [0, 2**64), got {seed}")
    unknown = set(seeded) - set(_GENERATORS)
    if unknown or isinstance(seeded, str):
        raise ValueError(f"seeded is a collection of {_GENERATORS}, got {seeded!r}")
    return Seeding(seed, *(name in seeded for name in _GENERATORS))
