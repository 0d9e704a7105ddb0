"""Iterable torch datasets, resumed through their own state, or by making their samples again.

A place is a number of batches this rank was served. A dataset with ``state_dict`` and
``load_state_dict``, or whose iterator has them, continues where it stood; any other is an opaque
generator, whose samples are made again up to the place, at the cost of making them. Either way
the number of workers, the batch size and the world must be those of the interrupted epoch.

A dataset with an indexed source needs none of this: a method ``indexed_source()`` returning a
map-style dataset with all samples of all ranks and workers (perhaps itself). ``CFIterator`` gives
it to ``ResumableDataLoader``, in our order.

Training process only; one open epoch at a time.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from iterators.errors import CorruptPositionError, NotResumableError, ResumeMismatchError
from iterators.order.batch_requests import Seeding
from iterators.order.fingerprint import dataset_fingerprint, length_or_none
from iterators.order.position import Identity, Layout, Position
from iterators.order.seeds import default_seed, generator_of
from iterators.protocol import Adapter, Delivery
from iterators.replay.lookahead import LookAhead
from iterators.replay.skipping import Skipping
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
from iterators.torch.sampling import (
    LoaderSettings,
    Tail,
    engine_of,
    require_plain,
    settings_of,
    tail_of,
)
from iterators.torch.worker_batches import (
    Item,
    Kind,
    Recipe,
    WorkerBatches,
    WorkerProgress,
    is_stateful,
)

logger = logging.getLogger(__name__)

_ADVICE = {
    "world": "An iterable dataset shares its samples out by itself: resume with as many ranks.",
    "batch": "Resume with the batch size of the interrupted run, at least until the epoch ends.",
    "workers": "Each worker stands at its own place in the dataset: resume with as many, at least "
    "until the epoch ends. A dataset with an indexed_source() is not bound to it.",
}


class ResumableIterableLoader(Adapter):
    """A ``DataLoader`` over an ``IterableDataset`` that ``CFIterator`` can enter anywhere.

    ``batch_size`` None is for a dataset that yields ready batches. Every epoch begins with the
    dataset as it is in the training process, after ``set_epoch(epoch)`` if it has that. It
    shares its samples out to ranks (``torch.distributed``) and workers (``get_worker_info``) by
    itself; ``rank`` and ``world`` are the process group's unless given.

    ``state_dict()`` is asked for after each batch and must cover the samples yielded so far, all
    that decides which come next, and nothing but plain values (see ``iterators.torch.encoding``).
    ``load_state_dict`` is called before ``iter``. Of a dataset without them, the iterator's are
    used, if it has them: ``load_state_dict`` is then called on a new iterator. Without either the
    dataset must repeat itself.

    The generators named by ``seeded`` are set before each batch from (seed, epoch, rank, worker,
    index of the batch in the worker), so random augmentation repeats itself. A ``collate_fn``
    must not carry anything over from batch to batch. What a generator draws that ``seeded`` leaves
    out is not exact: without workers the next batch is fetched before the boundary at which a
    manager saves the generators, and workers begin theirs anew. ``len`` is torch's: an estimate,
    from the dataset's own; an epoch ends when the dataset does. ``persistent_workers`` is not
    used, since such workers cannot be aimed.

    Every loop over ``CFIterator`` opens the epoch anew, so ``steps()`` called for a few batches
    at a time makes all samples before them again, each time, unless there is a state. Ranks that
    are served different numbers of batches in an epoch stand at different points from the first
    end on: their positions cannot be merged there (``CFIterator.merged_state``).

    Raises ``NotResumableError`` for a DataPipe, and with ``num_workers=0`` for a dataset that
    cannot be copied.
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
        self._takes_seed = seed is None
        if seed is None:
            seed = default_seed(generator, rank=share.rank, world=share.world)
        self._rank, self._batch_size, self._seed = share.rank, batch_size, seed
        self._stateful = is_stateful(dataset)
        self._dataset, self._kind = dataset, engine
        self._seeding = seeding_of(seed, seeded)
        self._settings = _without_persistence(settings)
        self._workers = settings.get("num_workers", 0)
        self._layout = Layout(share.world, batch_size or 0, self._workers, versions=VERSIONS)
        self._identity = Identity(
            f"iterable-{'state' if self._stateful else 'opaque'}-1",
            0,  # a dataset's length is an estimate, and may be exceeded
            dataset_fingerprint(dataset, fingerprint),
            seed,
            tail,
        )
        _require_plain_dataset(dataset, in_process=not self._workers)
        self._generator = torch.Generator()
        self._batches = WorkerBatches(dataset, self._recipe())
        self._make_engine()  # refuses contradicting settings here
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
        """Rebuild ``loader`` with all its settings; ``NotResumableError`` with the reason.

        ``seed`` is by default the initial seed of the loader's generator, else torch's.
        """
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

    @property
    def identity(self) -> Identity:
        """What must agree when a position is restored."""
        return self._identity

    @property
    def takes_seed(self) -> bool:
        """Whether no seed was given."""
        return self._takes_seed

    def reseed(self, seed: int) -> None:
        """Go on with the randomness of ``seed``."""
        self._seed, self._identity = seed, replace(self._identity, seed=seed)
        self._seeding = replace(self._seeding, seed=seed)
        self._batches = WorkerBatches(self._dataset, self._recipe())

    @property
    def layout(self) -> Layout:
        """How the data is spread; in the middle of an epoch it may not change."""
        return self._layout

    @property
    def rank(self) -> int:
        """This process's rank among those that share the data."""
        return self._rank

    def __len__(self) -> int:
        """As torch estimates it from the dataset's length; ``TypeError`` if it has none."""
        length = self.num_batches()
        if length is None:
            raise TypeError(f"{type(self._dataset).__name__} has no length")
        return length

    def num_batches(self) -> int | None:
        """Batches in an epoch as torch estimates them; None if the dataset has no length."""
        length, size = length_or_none(self._dataset), self._batch_size or 1
        if length is None:
            return None
        return length // size if self._identity.tail == "drop" else -(-length // size)

    def batches_left(self, start: int) -> None:
        """Unknown until the epoch ends."""
        return

    def is_over(self, place: int) -> bool:
        """Whether the open epoch ends here; fetches the next batch to find out."""
        return self._open is not None and self._open.is_over()

    def accept(self, position: Position) -> None:
        """In the middle of an epoch, the layout and this rank's state must fit."""
        if not position.position:
            return
        for name, advice in _ADVICE.items():
            expected, found = getattr(position.layout, name), getattr(self._layout, name)
            if expected != found:
                raise ResumeMismatchError(name, expected=expected, found=found, advice=advice)
        _require_states(len(position.states), self._layout.world)
        made = sum(self._standing(position.states[self._rank]).made)
        if made != position.position:
            raise CorruptPositionError(
                f"the saved position is {position.position} batches, its workers made {made}"
            )

    def open(self, *, epoch: int, start: int, state: Any = None) -> IterableDeliveries:
        """Start workers that stand as ``state`` says; at place 0, as the dataset does."""
        standing = self._standing(state) if start else WorkerProgress.fresh(self._workers)
        self._batches.aim(epoch, standing)
        aim_generator(self._generator, self._seed, epoch)
        self._open = IterableDeliveries(
            workers_started(self._make_engine()),
            standing,
            skipping=Skipping(standing.to_make_again),
            guard=None if self._workers else self._seeding,
            name=type(self._dataset).__name__,
        )
        return self._open

    def _standing(self, state: Any) -> WorkerProgress:
        return WorkerProgress.from_state(state, num_workers=self._workers, stateful=self._stateful)

    def _recipe(self) -> Recipe:
        return Recipe(
            self._batch_size,
            self._identity.tail == "drop",
            collate_of(self._batch_size, self._settings),
            self._seeding,
            self._rank,
            self._stateful,
        )

    def _make_engine(self) -> DataLoader[Item]:
        settings = settings_of_engine(self._settings, collate_fn=_unchanged)
        return self._kind(self._batches, batch_size=None, generator=self._generator, **settings)


class IterableDeliveries:
    """One opened epoch. ``guard`` protects the caller's generators."""

    def __init__(
        self,
        items: Iterator[Item],
        standing: WorkerProgress,
        *,
        skipping: Skipping,
        guard: Seeding | None,
        name: str,
    ) -> None:
        self._items, self._batches = items, LookAhead(self._next_batch)
        self._standing, self._place = standing, sum(standing.made)
        self._skipping, self._guard, self._name = skipping, guard, name

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        item = next(self._batches)
        self._standing = self._standing.behind(item)
        self._place += 1
        return Delivery(item.data, self._place, state=self._standing.to_state())

    def is_over(self) -> bool:
        """Whether no batch is left; fetches the next one, which is then served."""
        return self._batches.is_over()

    def close(self) -> None:
        """Let go of the loader's iterator, which ends its workers."""
        self._batches.close()
        self._items = iter(())
        self._skipping.close()

    def _next_batch(self) -> Item:
        while (item := fetched(self._items, self._guard)).kind not in (Kind.BATCH, Kind.LAST):
            self._note(item)
        return item

    def _note(self, item: Item) -> None:
        """Take account of an item without a batch."""
        if item.kind is Kind.ENDED:
            self._standing = self._standing.behind(item)
        elif item.kind is Kind.SKIPPED:
            self._skip(item.num_batches)
        elif item.kind is Kind.TOO_SHORT:
            raise ResumeMismatchError(
                f"the number of batches of worker {item.worker}",
                expected=f"at least {self._standing.made[item.worker]}",
                found=item.num_batches,
                advice=f"{self._name} must yield the same samples again to be resumed.",
            )

    def _skip(self, count: int) -> None:
        self._skipping.advance(count)
        if count and not self._skipping.left:
            logger.warning(
                "skipped %d batches by making their samples again, which took %.1f s, as %s has no "
                "state: skipping costs what making the samples costs, and is exact only if they "
                "are the same again. A state_dict() and load_state_dict(), or an indexed_source(), "
                "make it resume at once",
                self._skipping.total,
                self._skipping.close(),
                self._name,
            )


def _require_states(found: int, world: int) -> None:
    """One state for each rank; that of one rank alone was saved but not merged."""
    if 0 < found < world:
        raise ResumeMismatchError(
            "the number of ranks it needs the states of",
            expected=found,
            found=world,
            advice="Each rank saves its own state: make one of the positions of all ranks, in "
            "their order, with CFIterator.merged_state, and load the result on each.",
        )
    if found != world:
        raise CorruptPositionError(
            f"the saved position holds the states of {found} ranks, not of {world}"
        )


def _unchanged(item: Item) -> Item:
    return item


def _without_persistence(settings: LoaderSettings) -> LoaderSettings:
    if settings.get("persistent_workers"):
        logger.info(
            "persistent_workers is not used: the workers of an iterable dataset are aimed once, "
            "when they start, so each epoch starts its own"
        )
    return {**settings, "persistent_workers": False}


def _require_plain_dataset(dataset: IterableDataset[Any], *, in_process: bool) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, IterDataPipe):
        raise NotResumableError(
            f"{name} is a DataPipe, which DataLoader itself shuffles and shares out. Use an "
            "IterableDataset"
        )
    try:
        copy.deepcopy(dataset) if in_process else None
    except Exception as error:
        raise NotResumableError(
            f"{name} cannot be copied ({error}), so a second epoch in this process would not begin "
            "as the first one did. Use num_workers=1, open what cannot be copied in __iter__, or "
            "define __deepcopy__"
        ) from error
