"""Map-style torch datasets in our order: enterable anywhere, at any layout, to the same bits.

``ResumableDataLoader`` runs a plain ``torch.utils.data.DataLoader`` over our batch sampler with
a private generator (``iter(DataLoader)`` otherwise draws from the default one, and dropout
shifts after a resume). ``ResumableDataLoader.like`` rebuilds a given loader with all its other
settings, or says why it cannot. Training process only; one open epoch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, Unpack

import numpy as np
import torch
from torch.utils.data import DataLoader

from iterators.order.batch_requests import (
    BatchRequestCollate,
    BatchRequestDataset,
    BatchRequestSampler,
    Delivered,
    Seeding,
)
from iterators.order.environment import length_of, map_style, sample_order
from iterators.order.epoch import Int64, ListedOrder, Order
from iterators.order.fingerprint import dataset_fingerprint, sample_name
from iterators.order.position import Identity, Layout
from iterators.order.seeds import default_seed, generator_of
from iterators.protocol import Adapter, Delivery
from iterators.torch.common import (
    GENERATORS,
    VERSIONS,
    Engine,
    aim_generator,
    collate_of,
    fetched,
    seeding_of,
    settings_of_engine,
    share_of,
    workers_started,
)
from iterators.torch.sampling import LoaderSettings, Tail, engine_of, read_sampling, settings_of

#: The user's own order: ``(seed, epoch) -> ids``, the same for the same arguments, always.
OrderFunction: TypeAlias = Callable[[int, int], Sequence[int] | Int64]


class ResumableDataLoader(Adapter):
    """A ``DataLoader`` over a map-style dataset that ``CFIterator`` can enter anywhere.

    ``batch_size`` is per rank; None delivers single samples, uncollated. ``shuffle`` permutes by
    (``seed``, epoch), in the dataset's own ``epoch_order(seed, epoch)`` if it has one (see
    ``ShardedDataset``); ``order``, a function (seed, epoch) -> ids of constant length, replaces
    both orders. ``seed`` is by default the initial seed of ``generator``, else of torch
    (``torch.manual_seed``); it is rank 0's on all ranks, and a restored run keeps its own.
    ``tail="short"`` shares the last, partial batch evenly, so that every sample is
    served once; a rank with nothing left gets one sample of weight 0 (``CFIterator.last_weights``:
    multiply the per-sample loss by it). ``tail="drop"`` does not serve it: not exactly-once.
    ``rank`` and ``world`` are the process group's unless given. ``seeded`` names the generators
    ("torch", "python", "numpy") set for each sample from (seed, epoch, id), about 10 us each but
    torch's. ``fingerprint`` names the data where ``dataset_fingerprint`` cannot tell. All other
    settings are ``DataLoader``'s; ``engine`` is it, or torchdata's ``StatefulDataLoader``.

    Raises ``NotResumableError`` for an ``IterableDataset`` without an indexed source,
    ``ValueError`` for settings that contradict each other.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        order: OrderFunction | None = None,
        tail: Tail = "short",
        rank: int | None = None,
        world: int | None = None,
        seeded: Collection[str] = GENERATORS,
        fingerprint: str | None = None,
        engine: Engine = DataLoader,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        self._share = share_of(batch_size, tail, rank, world)
        self._takes_seed = seed is None
        if seed is None:
            seed = default_seed(generator, rank=self._share.rank, world=self._share.world)
        self._shuffle, self._function, self._seed = shuffle, order, seed
        self._dataset = dataset = map_style(dataset)
        self._num_samples = length_of(dataset)
        self._current = self._make_order(0)
        self._identity = Identity(
            self._current.algorithm,
            self._current.n,
            dataset_fingerprint(dataset, fingerprint),
            seed,
            tail,
        )
        if not self._share.batches(self._identity.n):
            raise ValueError(
                f"tail='drop' would serve nothing: {self._identity.n} samples make no whole "
                f"batch of {self._share.global_batch}"
            )
        self._epoch = 0
        self._seeding = seeding_of(seed, seeded)
        self._sampler = BatchRequestSampler(self._current, self._share)
        self._generator = torch.Generator()
        self._kind, self._settings = engine, settings
        self._collate = BatchRequestCollate(
            collate_of(batch_size, settings), single=batch_size is None
        )
        self._engine = self._make_engine()

    @classmethod
    def like(
        cls,
        loader: DataLoader[Any],
        *,
        seed: int | None = None,
        order: OrderFunction | None = None,
        seeded: Collection[str] = GENERATORS,
        fingerprint: str | None = None,
    ) -> ResumableDataLoader:
        """Rebuild ``loader`` with all its settings, over our order instead of its sampler.

        ``seed`` is by default that of one of our samplers (which is refused with another one,
        ``ValueError``) or of torch's distributed one (where it is not 0, its default), else the
        initial seed of the loader's generator, else torch's. The tail is "drop" where the loader
        itself has ``drop_last=True``; a sampler's ``drop_last`` alone leaves nothing out, and that
        is logged. Raises ``NotResumableError`` with the reason where rebuilding would change what
        is served; a custom sampler can be replaced by ``order``.
        """
        found = read_sampling(loader, seed=seed, custom_order=order is not None)
        return cls(
            loader.dataset,
            found.batch_size,
            shuffle=found.shuffle,
            seed=found.seed,
            generator=generator_of(loader),
            order=order,
            tail=found.tail,
            rank=found.rank,
            world=found.world,
            seeded=seeded,
            fingerprint=found.fingerprint if fingerprint is None else fingerprint,
            engine=engine_of(loader),
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
        return Layout(self._share.world, self._share.batch, workers, versions=VERSIONS)

    @property
    def takes_seed(self) -> bool:
        """Whether no seed was given."""
        return self._takes_seed

    def reseed(self, seed: int) -> None:
        """Go on in the order and with the randomness of ``seed``."""
        self._seed, self._identity = seed, replace(self._identity, seed=seed)
        self._seeding = replace(self._seeding, seed=seed)
        self._current, self._epoch = self._make_order(0), 0
        self._engine = self._make_engine()

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
            order = self._make_order(epoch)
            if order.n != self._identity.n:
                raise ValueError(
                    f"order(seed, epoch) must have one length: {self._identity.n} ids in epoch 0, "
                    f"{order.n} in epoch {epoch}"
                )
            self._current, self._epoch = order, epoch
        return self._current

    def name_of(self, sample: int) -> str:
        """The sample's path, for a dataset that lists its files."""
        return sample_name(self._dataset, sample)

    def open(self, *, epoch: int, start: int, state: Any = None) -> TorchDeliveries:
        """Start an epoch at place ``start``; workers begin to load, nothing is fetched here."""
        self._sampler.aim(self.order(epoch), epoch=epoch, start=start)
        aim_generator(self._generator, self._seed, epoch)
        # A StatefulDataLoader keeps its iterator, and so its workers, as long as it lives.
        engine = self._engine if self._engine.persistent_workers else self._make_engine()
        guard = self._seeding if self._engine.num_workers == 0 else None
        span = (start, self._identity.n, self._share.global_batch)
        try:
            batches = workers_started(engine)
        except BaseException:  # a persistent worker died while it waited
            self.close()
            raise
        return TorchDeliveries(batches, span=span, guard=guard, on_failure=self.close)

    def close(self) -> None:
        """End persistent workers; the next ``open`` starts new ones."""
        if self._engine.persistent_workers:
            self._engine = self._make_engine()

    def _make_order(self, epoch: int) -> Order:
        if self._function is not None:
            return ListedOrder(self._function(self._seed, epoch), num_samples=self._num_samples)
        return sample_order(self._dataset, self._seed, epoch, shuffle=self._shuffle)

    def _make_engine(self) -> DataLoader[Delivered]:
        settings = settings_of_engine(self._settings, collate_fn=self._collate)
        return self._kind(
            BatchRequestDataset(self._dataset, self._seeding),  # type: ignore[arg-type]
            batch_sampler=self._sampler,  # type: ignore[arg-type]  # BatchRequestDataset takes them
            generator=self._generator,
            **settings,
        )


class TorchDeliveries:
    """One opened epoch of a torch loader. ``guard`` protects the caller's generators.

    ``on_failure`` is called when a fetch failed: persistent workers one of which is dead, or that
    were interrupted, never serve again.
    """

    def __init__(
        self,
        batches: Iterator[Delivered],
        *,
        span: tuple[int, int, int],
        guard: Seeding | None,
        on_failure: Callable[[], None],
    ) -> None:
        self._batches: Iterator[Delivered] | None = batches
        self._place, self._stop, self._stride = span
        self._guard, self._on_failure = guard, on_failure

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        if self._batches is None:
            raise StopIteration
        try:
            ids, weights, data = fetched(self._batches, self._guard)
        except StopIteration:
            raise
        except BaseException:
            self._on_failure()
            raise
        self._place = min(self._place + self._stride, self._stop)
        return Delivery(
            data,
            self._place,
            np.frombuffer(ids, dtype=np.int64),
            np.frombuffer(weights, dtype=np.float32),
        )

    def close(self) -> None:
        """Let go of the loader's iterator, which ends workers that are not persistent."""
        self._batches = None
