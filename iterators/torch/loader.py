"""Map-style torch datasets in our order, which can be entered at any place and layout.

``ResumableDataLoader`` runs a plain ``torch.utils.data.DataLoader`` over our batch sampler, with a
private generator: ``iter(DataLoader)`` would otherwise draw from torch's default generator, once
more in a resumed process than in an uninterrupted one, and shift its dropout. Training process
only; one open epoch at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader
from typing_extensions import Unpack

from iterators.errors import ResumeMismatchError
from iterators.order.batch_requests import (
    BatchRequestCollate,
    BatchRequestDataset,
    BatchRequestSampler,
    Delivered,
    Seeding,
)
from iterators.order.contents import sample_digests
from iterators.order.environment import length_of, map_style, sample_order
from iterators.order.epoch import EpochOrder, Int64, ListedOrder, Order, SequentialOrder
from iterators.order.fingerprint import dataset_fingerprint, sample_name
from iterators.order.generators import warn_of_unseedable
from iterators.order.position import Identity, Layout
from iterators.order.seeds import generator_of
from iterators.protocol import Delivery
from iterators.torch.common import (
    GENERATORS,
    VERSIONS,
    Engine,
    SeededAdapter,
    collate_of,
    fetch_next,
    seed_generator,
    seeding_of,
    settings_of_engine,
    share_of,
    workers_started,
)
from iterators.torch.drawn import DrawnOrder
from iterators.torch.sampling import LoaderSettings, Tail, engine_of, read_sampling, settings_of

#: The user's own order: ``(seed, epoch) -> ids``. The same arguments must give the same ids.
OrderFunction: TypeAlias = Callable[[int, int], Sequence[int] | Int64 | DrawnOrder]


class ResumableDataLoader(SeededAdapter):
    """A ``DataLoader`` over a map-style dataset that ``CFIterator`` can enter at any sample.

    ::

        loader = ResumableDataLoader(dataset, 64, shuffle=True, num_workers=8)
        train_loader = CFIterator(loader, cf_manager=manager)

    The order of the samples and their augmentation depend on (seed, epoch, sample id) alone. So a
    run may be resumed in mid-epoch with a different number of ranks, batch size or number of
    workers, and still serves every sample of the epoch once, with the same bits.

    The dataset may grow or shrink between two epochs: an epoch has the samples that were there as
    it began, in a resumed process too, which may open it with more samples but not with fewer.

    Arguments
        batch_size: samples per batch of this rank; None delivers single samples, uncollated.
        shuffle: permute the samples by (seed, epoch), or use the dataset's own
            ``epoch_order(seed, epoch)`` if it has one (see ``ShardedDataset``).
        seed: default: the initial seed of ``generator``, else of torch (``torch.manual_seed``);
            rank 0's on all ranks. A restored run keeps its own.
        order: a function (seed, epoch) -> ids, used instead of either order.
        tail: "short" shares the last, partial batch evenly among the ranks, so that every sample
            is served once. A rank that gets none of it is given one sample of weight 0: multiply
            the per-sample loss by ``CFIterator.last_weights``. "drop" does not serve that batch.
        rank, world: default: those of the process group.
        seeded: which generators ("torch", "python", "numpy") to seed for each sample: the global
            ones, and those that the dataset, its transforms or ``collate_fn`` keep. The global ones
            take about 2 us for torch and 10 us for each of the others, a private one 1 to 4 us.
        fingerprint: a name for the data, if the one derived from the dataset does not fit.
        engine: ``DataLoader``, or torchdata's ``StatefulDataLoader``.
        settings: any other setting of ``DataLoader``.

    Raises ``NotResumableError`` for an ``IterableDataset`` without ``indexed_source()``, and
    ``ValueError`` for settings that contradict one another.
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
        super().__init__(seed, generator, self._share)
        self._shuffle, self._order_function = shuffle, order
        self.dataset = dataset = map_style(dataset)
        self.batch_size = batch_size
        self._num_samples = length_of(dataset)
        self._current = self._make_order(0)
        self._identity = Identity(
            self._current.algorithm,
            self._current.n,
            dataset_fingerprint(dataset, fingerprint),
            self._seed,
            tail,
            sample_digests(dataset, fingerprint),
        )
        self._require_batches()
        self._epoch: int | None = 0
        self._seeding = seeding_of(self._seed, seeded)
        self._sampler = BatchRequestSampler(self._current, self._share)
        self._generator = torch.Generator()
        self._engine_class, self._settings = engine, settings
        self._collate = BatchRequestCollate(
            collate_of(batch_size, settings), single=batch_size is None
        )
        self._engine = self._make_engine()
        warn_of_unseedable(self._seeding, dataset=dataset, collate_fn=self._collate.collate)

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
        """Rebuild ``loader`` with all its settings, with our order instead of its sampler.

        torch's weighted, subset, replacing or shorter samplers keep their order: their indices are
        drawn again, up to the place. ``seed`` defaults to that of one of our samplers, or of
        torch's ``DistributedSampler`` (unless it is 0, its default); else to the initial seed of
        the loader's generator, else of torch. The tail is "drop" if the loader itself has
        ``drop_last=True``. The ``drop_last`` of a sampler leaves nothing out, and that is logged.

        Raises ``NotResumableError`` with the reason if rebuilding would change which samples are
        served (replace a custom sampler by ``order``), and ``ValueError`` for a ``seed`` that
        differs from that of one of our samplers.
        """
        found = read_sampling(loader, seed=seed, custom_order=order is not None)
        return cls(
            loader.dataset,
            found.batch_size,
            shuffle=found.shuffle,
            seed=found.seed,
            generator=generator_of(loader),
            order=order or found.order,
            tail=found.tail,
            rank=found.rank,
            world=found.world,
            seeded=seeded,
            fingerprint=found.fingerprint if fingerprint is None else fingerprint,
            engine=engine_of(loader),
            **settings_of(loader),
        )

    @property
    def layout(self) -> Layout:
        """How the data is spread over ranks and workers now."""
        workers = self._engine.num_workers
        return Layout(self._share.world, self._share.batch, workers, versions=VERSIONS)

    def _rebuild(self) -> None:
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

    @property
    def takes_length(self) -> bool:
        """An epoch has as many samples as the dataset when it begins."""
        return True

    def measure(self, n: int | None = None) -> None:
        """Take the dataset's length for the epoch to come, or ``n`` for one that goes on."""
        num_samples = length_of(self.dataset) if n is None else n
        if num_samples != self._num_samples:
            self._num_samples, self._epoch = num_samples, None
        if n is not None or self._counts_samples:
            self._identity = replace(self._identity, n=num_samples)

    @property
    def _counts_samples(self) -> bool:
        """Whether there is a place for each sample; an order of the user's may have others."""
        return isinstance(self._current, EpochOrder | SequentialOrder)

    def order(self, epoch: int) -> Order:
        """The order of ``epoch``. Keeps the last one asked for, since it may be slow to make."""
        if epoch != self._epoch:
            self._current, self._epoch = self._make_order(epoch), epoch
        return self._current

    def name_of(self, sample: int) -> str:
        """The path of the sample, for a dataset that lists its files."""
        return sample_name(self.dataset, sample)

    def open(self, *, epoch: int, start: int, state: Any = None) -> TorchDeliveries:
        """Start an epoch at place ``start``. The workers begin to load; nothing is fetched yet."""
        self._sampler.seek(self._entered(epoch, start), epoch=epoch, start=start)
        seed_generator(self._generator, self._seed, epoch)
        # Without persistent workers, use a new engine per epoch: a StatefulDataLoader keeps its
        # iterator, and with it the workers, as long as it lives.
        engine = self._engine if self._engine.persistent_workers else self._make_engine()
        guard = self._seeding if self._engine.num_workers == 0 else None
        span = (start, self._identity.n, self._share.global_batch)
        try:
            batches = workers_started(engine)
        except BaseException:  # a persistent worker died between two epochs
            self.close()
            raise
        return TorchDeliveries(batches, span=span, guard=guard, on_failure=self.close)

    def _entered(self, epoch: int, start: int) -> Order:
        """The order of an epoch that begins with the data as it is, or goes on as it began."""
        order = self.order(epoch)
        if not start:
            self._identity = replace(self._identity, n=order.n)
            self._require_batches()
            return order
        left = length_of(self.dataset) if self._counts_samples else order.n
        if order.n != self._identity.n or left < order.n:
            raise ResumeMismatchError(
                f"the length of the data in epoch {epoch}",
                expected=self._identity.n,
                found=min(left, order.n),
                advice="An epoch goes on with the samples that were there as it began: give the "
                "dataset at least those before the loop asks for the first batch.",
            )
        return order

    def _require_batches(self) -> None:
        if not self._share.batches(self._identity.n):
            raise ValueError(
                f"tail='drop' would serve nothing: {self._identity.n} samples make no whole "
                f"batch of {self._share.global_batch}"
            )

    def twin(self) -> ResumableDataLoader:
        """The same loader over again: only the dataset and the functions are shared."""
        other = copy.copy(self)
        other._sampler = BatchRequestSampler(self._current, self._share)
        other._generator = torch.Generator()
        other._engine = other._make_engine()
        return other

    def close(self) -> None:
        """End persistent workers; the next ``open`` starts new ones."""
        if self._engine.persistent_workers:
            self._engine = self._make_engine()

    def _make_order(self, epoch: int) -> Order:
        if self._order_function is not None:
            made = self._order_function(self._seed, epoch)
            if isinstance(made, DrawnOrder):
                return made
            return ListedOrder(made, num_samples=length_of(self.dataset))
        return sample_order(
            self.dataset, self._seed, epoch, shuffle=self._shuffle, n=self._num_samples
        )

    def _make_engine(self) -> DataLoader[Delivered]:
        settings = settings_of_engine(self._settings, collate_fn=self._collate)
        return self._engine_class(
            BatchRequestDataset(  # type: ignore[arg-type]
                self.dataset, self._seeding, self._collate.collate
            ),
            batch_sampler=self._sampler,  # type: ignore[arg-type]  # BatchRequestDataset takes them
            generator=self._generator,
            **settings,
        )


class TorchDeliveries:
    """One opened epoch of a torch loader. ``span`` is (first place, end, places per batch).

    ``guard`` keeps the caller's generators unchanged, see ``fetch_next``. ``on_failure`` is called
    when a fetch fails: persistent workers of which one has died, or whose fetch was interrupted,
    never serve again and have to be replaced.
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
            ids, weights, data = fetch_next(self._batches, self._guard)
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
        """Release the loader's iterator, which ends workers that are not persistent."""
        self._batches = None
