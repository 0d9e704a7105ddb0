"""Iterable torch datasets, resumed through their own state or by making their samples again.

A place is the number of batches that this rank was served. A dataset with ``state_dict`` and
``load_state_dict``, or one whose iterator has them, continues where it was. Any other dataset is
opaque: its samples are made again up to the place. In both cases the number of workers, the batch
size and the world size must be those of the interrupted epoch.

None of this is needed for a dataset with a method ``indexed_source()`` that returns a map-style
dataset of all samples of all ranks and workers (perhaps itself): ``CFIterator`` gives that one to
``ResumableDataLoader``.

Training process only; one open epoch at a time.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from typing_extensions import Unpack

from iterators.errors import CorruptPositionError, NotResumableError, ResumeMismatchError
from iterators.order.batch_requests import Seeding
from iterators.order.fingerprint import dataset_fingerprint, length_or_none
from iterators.order.generators import warn_of_unseedable
from iterators.order.position import Identity, Layout, Position
from iterators.order.seeds import generator_of
from iterators.protocol import Delivery
from iterators.replay.lookahead import LookAhead
from iterators.replay.skipping import Skipping
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
from iterators.torch.known_streams import require_exact, seeds_of
from iterators.torch.sampling import (
    LoaderSettings,
    Tail,
    engine_of,
    require_plain,
    settings_of,
    tail_of,
)
from iterators.torch.worker_batches import (
    BatchSettings,
    ItemKind,
    WorkerBatches,
    WorkerItem,
    WorkerProgress,
    is_stateful,
)

logger = logging.getLogger(__name__)

_ADVICE = {
    "world": "An iterable dataset splits its samples among the ranks itself: resume with the same "
    "number of ranks.",
    "batch": "Resume with the batch size of the interrupted run, at least until the epoch ends.",
    "workers": "Each worker has its own place in the dataset: resume with the same num_workers, at "
    "least until the epoch ends. A dataset with an indexed_source() can change it.",
}


class ResumableIterableLoader(SeededAdapter):
    """A ``DataLoader`` over an ``IterableDataset`` that ``CFIterator`` can resume in mid-epoch.

    ::

        class Lines(IterableDataset):
            def __init__(self, path):
                self.path, self.offset = path, 0

            def __iter__(self):
                with open(self.path, "rb") as file:
                    file.seek(self.offset)
                    while line := file.readline():
                        self.offset = file.tell()
                        yield line

            def state_dict(self):
                return {"offset": self.offset}

            def load_state_dict(self, state):
                self.offset = state["offset"]

    The dataset splits its samples among ranks (``torch.distributed``) and workers
    (``get_worker_info``) itself. Every epoch starts with the dataset as it is in the training
    process, after ``set_epoch(epoch)`` if the dataset has that method.

    **State.** ``state_dict()`` is called after each batch. The state must account for all samples
    yielded so far and determine those that follow. It may hold plain values only: None, bool, int,
    float, str, bytes, lists, tuples, dictionaries, NumPy arrays and CPU tensors.
    ``load_state_dict`` is called before ``iter``. If only the dataset's *iterator* has the two
    methods, they are called on that, after ``iter``. A dataset without state must yield the same
    samples again, and is resumed by making all samples up to the place.

    **Randomness.** The generators named by ``seeded`` are seeded before each batch from (seed,
    epoch, rank, worker, index of the batch in the worker), so random augmentation is repeatable.
    Generators that ``seeded`` leaves out do not resume exactly: without workers, the next batch is
    fetched before the boundary at which a manager saves the generators, and worker processes start
    with fresh ones. A ``collate_fn`` must not keep anything from one batch to the next.

    **Limits.** In mid-epoch, resume with the same world size, ``batch_size`` and ``num_workers``.
    ``len`` is torch's estimate, from the dataset's own length; an epoch ends when the dataset does.
    ``persistent_workers`` is ignored, since workers learn their place when they start. Every loop
    over ``CFIterator`` reopens the epoch, so without state, ``steps()`` for a few batches at a time
    makes all earlier samples again each time. If ranks are served different numbers of batches,
    their positions cannot be merged once the first of them has reached the end of the epoch (see
    ``CFIterator.merged_state``).

    Arguments
        batch_size: samples per batch of this rank; None for a dataset that yields whole batches.
        seed: default: the initial seed of ``generator``, else of torch; rank 0's on all ranks.
        tail: "short" serves each worker's last, partial batch; "drop" does not.
        rank, world: default: those of the process group.
        seeded: which global generators to seed, of "torch", "python" and "numpy".
        fingerprint: a name for the data, if the one derived from the dataset does not fit.
        engine: ``DataLoader``, or torchdata's ``StatefulDataLoader``.
        settings: any other setting of ``DataLoader``.

    Raises ``NotResumableError`` for a DataPipe, for a stream of another library whose state does
    not cover it (a shuffle buffer, a shuffle by the clock), and with ``num_workers=0`` for a
    dataset that cannot be deep-copied.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int | None = 1,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        tail: Tail = "short",
        rank: int | None = None,
        world: int | None = None,
        seeded: Collection[str] = GENERATORS,
        fingerprint: str | None = None,
        engine: Engine = DataLoader,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        share = share_of(batch_size, tail, rank, world)
        super().__init__(seed, generator, share)
        self._rank, self.batch_size = share.rank, batch_size
        self._stateful = is_stateful(dataset)
        self.dataset, self._engine_class = dataset, engine
        self._seeding = seeding_of(self._seed, seeded)
        self._settings = _without_persistence(settings)
        self._workers = settings.get("num_workers", 0)
        self._layout = Layout(share.world, batch_size or 0, self._workers, versions=VERSIONS)
        self._identity = Identity(
            f"iterable-{'state' if self._stateful else 'opaque'}-1",
            0,  # a dataset's length is an estimate, and may be exceeded
            dataset_fingerprint(dataset, fingerprint) + seeds_of(dataset),
            self._seed,
            tail,
        )
        _require_plain_dataset(dataset, in_process=not self._workers)
        self._generator = torch.Generator()
        self._batches = WorkerBatches(dataset, self._batch_settings())
        self._make_engine()  # refuses contradicting settings here
        warn_of_unseedable(
            self._seeding, dataset=dataset, collate_fn=collate_of(batch_size, settings)
        )
        self._open: IterableDeliveries | None = None

    @classmethod
    def like(
        cls,
        loader: DataLoader[Any],
        *,
        seed: int | None = None,
        seeded: Collection[str] = GENERATORS,
        fingerprint: str | None = None,
    ) -> ResumableIterableLoader:
        """Rebuild ``loader`` with all its settings; ``NotResumableError`` says why it cannot be.

        ``seed`` defaults to the initial seed of the loader's generator, else of torch.
        """
        require_exact(loader.dataset)  # first: it says more about loaders of known libraries
        require_plain(loader)
        return cls(
            loader.dataset,  # type: ignore[arg-type]
            loader.batch_size,
            seed=seed,
            generator=generator_of(loader),
            tail=tail_of(loader),
            seeded=seeded,
            fingerprint=fingerprint,
            engine=engine_of(loader),
            **settings_of(loader),
        )

    def _rebuild(self) -> None:
        self._batches = WorkerBatches(self.dataset, self._batch_settings())

    @property
    def layout(self) -> Layout:
        """How the data is spread over ranks and workers. In mid-epoch it must not change."""
        return self._layout

    @property
    def rank(self) -> int:
        """This process's rank among those that share the data."""
        return self._rank

    def __len__(self) -> int:
        """Torch's estimate from the dataset's length; ``TypeError`` if the dataset has none."""
        length = self.num_batches()
        if length is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length")
        return length

    def num_batches(self) -> int | None:
        """Torch's estimate of the batches in an epoch; None if the dataset has no length."""
        length, size = length_or_none(self.dataset), self.batch_size or 1
        if length is None:
            return None
        return length // size if self._identity.tail == "drop" else -(-length // size)

    def batches_left(self, start: int) -> None:
        """Unknown until the epoch ends."""
        return

    def is_over(self, place: int) -> bool:
        """Whether the open epoch ends here. Fetches the next batch to find out, and keeps it."""
        return self._open is not None and self._open.is_over()

    def accept(self, position: Position) -> None:
        """Raise unless, in mid-epoch, the layout and this rank's saved state fit."""
        if not position.position:
            return
        for name, advice in _ADVICE.items():
            expected, found = getattr(position.layout, name), getattr(self._layout, name)
            if expected != found:
                raise ResumeMismatchError(name, expected=expected, found=found, advice=advice)
        _require_states(len(position.states), self._layout.world)
        made = sum(self._progress(position.states[self._rank]).made)
        if made != position.position:
            raise CorruptPositionError(
                f"the saved position lies after {position.position} batches, but its workers have "
                f"made {made}"
            )

    def open(self, *, epoch: int, start: int, state: Any = None) -> IterableDeliveries:
        """Start the workers at ``state``, or, at place 0, with the dataset as it is."""
        progress = self._progress(state) if start else WorkerProgress.fresh(self._workers)
        self._batches.seek(epoch, progress)
        seed_generator(self._generator, self._seed, epoch)
        self._open = IterableDeliveries(
            workers_started(self._make_engine()),
            progress,
            skipping=Skipping(progress.to_make_again),
            guard=None if self._workers else self._seeding,
            name=type(self.dataset).__name__,
        )
        return self._open

    def twin(self) -> ResumableIterableLoader:
        """The same loader over again: an epoch iterates over copies of the dataset anyway."""
        other = copy.copy(self)
        other._generator = torch.Generator()
        other._rebuild()
        return other

    def _progress(self, state: Any) -> WorkerProgress:
        return WorkerProgress.from_state(state, num_workers=self._workers, stateful=self._stateful)

    def _batch_settings(self) -> BatchSettings:
        return BatchSettings(
            self.batch_size,
            self._identity.tail == "drop",
            collate_of(self.batch_size, self._settings),
            self._seeding,
            self._rank,
            self._stateful,
        )

    def _make_engine(self) -> DataLoader[WorkerItem]:
        settings = settings_of_engine(self._settings, collate_fn=_unchanged)
        return self._engine_class(
            self._batches, batch_size=None, generator=self._generator, **settings
        )


class IterableDeliveries:
    """One opened epoch. ``guard`` keeps the caller's generators unchanged, see ``fetch_next``."""

    def __init__(
        self,
        items: Iterator[WorkerItem],
        progress: WorkerProgress,
        *,
        skipping: Skipping,
        guard: Seeding | None,
        name: str,
    ) -> None:
        self._items, self._batches = items, LookAhead(self._next_batch)
        self._progress, self._place = progress, sum(progress.made)
        self._skipping, self._guard, self._name = skipping, guard, name

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        item = next(self._batches)
        if item.unsaved:
            _warn_of_unsaved(self._name, item.unsaved)
        self._progress = self._progress.after(item)
        self._place += 1
        return Delivery(item.data, self._place, state=self._progress.to_state())

    def is_over(self) -> bool:
        """Whether no batch is left. Fetches the next one, which the next call serves."""
        return self._batches.is_over()

    def close(self) -> None:
        """Release the loader's iterator, which ends its workers."""
        self._batches.close()
        self._items = iter(())
        self._skipping.close()

    def _next_batch(self) -> WorkerItem:
        while (item := fetch_next(self._items, self._guard)).kind not in (
            ItemKind.BATCH,
            ItemKind.LAST,
        ):
            self._note(item)
        return item

    def _note(self, item: WorkerItem) -> None:
        """Take account of an item without a batch."""
        if item.kind is ItemKind.ENDED:
            self._progress = self._progress.after(item)
        elif item.kind is ItemKind.SKIPPED:
            self._skip(item.num_batches)
        elif item.kind is ItemKind.TOO_SHORT:
            raise ResumeMismatchError(
                f"the number of batches that worker {item.worker} can make",
                expected=f"at least {self._progress.made[item.worker]}",
                found=item.num_batches,
                advice=f"To be resumed without state, {self._name} must yield the same samples "
                "again.",
            )

    def _skip(self, count: int) -> None:
        self._skipping.advance(count)
        if count and not self._skipping.left:
            logger.warning(
                "skipped %d batches by making their samples again, which took %.1f s: %s has no "
                "state. This is exact only if it yields the same samples again. To resume at once, "
                "give it state_dict() and load_state_dict(), or an indexed_source()",
                self._skipping.total,
                self._skipping.close(),
                self._name,
            )


def _require_states(found: int, world: int) -> None:
    """Raise unless there is one state per rank. A single one was saved but never merged."""
    if 0 < found < world:
        raise ResumeMismatchError(
            "the number of ranks it needs the states of",
            expected=found,
            found=world,
            advice="Each rank saves its own state: merge the positions of all ranks, in rank "
            "order, with CFIterator.merged_state, and load the result on every rank.",
        )
    if found != world:
        raise CorruptPositionError(
            f"the saved position holds the states of {found} ranks, not of {world}"
        )


@functools.cache
def _warn_of_unsaved(name: str, path: str) -> None:
    logger.warning(
        "%s draws from %s, and its state_dict() does not hold the state of that generator, so a "
        "resumed run draws other numbers. Save it there (state['rng'] = "
        "self.rng.bit_generator.state), and set it in load_state_dict(); or draw from random, "
        "numpy.random or torch, which are seeded for each batch",
        name,
        path,
    )


def _unchanged(item: WorkerItem) -> WorkerItem:
    return item


def _without_persistence(settings: LoaderSettings) -> LoaderSettings:
    if settings.get("persistent_workers"):
        logger.info(
            "persistent_workers is ignored: the workers of an iterable dataset learn their place "
            "when they start, so each epoch starts new ones"
        )
    return {**settings, "persistent_workers": False}


def _require_plain_dataset(dataset: IterableDataset[Any], *, in_process: bool) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, IterDataPipe):
        raise NotResumableError(
            f"{name} is a DataPipe, which DataLoader itself shuffles and splits among workers. Use "
            "an IterableDataset"
        )
    require_exact(dataset)
    try:
        copy.deepcopy(dataset) if in_process else None
    except Exception as error:
        raise NotResumableError(
            f"{name} cannot be copied ({error}), so a second epoch in this process would not start "
            "like the first one. Use num_workers=1, open what cannot be copied in __iter__, or "
            "define __deepcopy__"
        ) from error
