"""The progress of an iterable dataset's workers, and the code that runs inside each worker.

Every worker forms its own batches and sends each one together with the dataset's state after it.
Torch takes one item from each worker in turn and skips workers that have ended. So the order of
the batches follows from (worker, index of the batch in the worker), and a ``WorkerProgress``
describes a point in it completely.

A restored epoch must start with the worker whose turn it is, but torch always starts with worker 0.
Each worker before that one therefore sends a ``WAITED`` item first, which the training process
discards. The alternative, to renumber the workers, would change the ids, seeds and
``get_worker_info()`` that the dataset sees.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from iterators.errors import CorruptPositionError, NotResumableError
from iterators.order.batch_requests import Seeding, Wrapped
from iterators.order.epoch import fold64
from iterators.order.generators import PrivateGenerators
from iterators.torch.encoding import dumps, loads
from iterators.torch.known_streams import set_epoch

logger = logging.getLogger(__name__)

#: A worker that makes batches again reports progress this many times at most.
_ROUNDS = 50


class ItemKind(Enum):
    """The kinds of item that a worker sends; only the first two carry data."""

    BATCH = "a batch"
    LAST = "a batch, and the worker has no more"
    ENDED = "no batch: the worker has no more"
    SKIPPED = "no batch: the worker has made num_batches again, on its way to the saved place"
    TOO_SHORT = "no batch: the dataset ended before the saved place; num_batches were made again"
    WAITED = "no batch: it was not this worker's turn"


class WorkerItem(NamedTuple):
    """One item from a worker. ``state`` is text because pinning memory would copy tensors in it.

    ``unsaved``: how a private generator is reached that was drawn from, and that the state of the
    dataset does not depend on.
    """

    worker: int
    kind: ItemKind
    num_batches: int = 0
    state: str = ""
    data: Any = None
    unsaved: str = ""


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """How far each worker has come in the epoch, and whose turn is next.

    For each worker: ``made``, the number of batches it has made; ``ended``, whether it has no more;
    ``states``, the encoded state of its dataset or of the dataset's iterator. A state is empty for
    a worker that has made nothing or has ended, and for every worker of a dataset without state.
    """

    made: tuple[int, ...]
    ended: tuple[bool, ...]
    states: tuple[str, ...]
    turn: int = 0

    @classmethod
    def fresh(cls, num_workers: int) -> WorkerProgress:
        """The beginning of an epoch. Loading in the training process counts as one worker."""
        count = max(1, num_workers)
        return cls((0,) * count, (False,) * count, ("",) * count)

    def after(self, item: WorkerItem) -> WorkerProgress:
        """The progress after ``item``, which is a batch or an end."""
        made = self.made[item.worker] + (item.kind is not ItemKind.ENDED)
        ended = item.kind is not ItemKind.BATCH
        return WorkerProgress(
            _replaced(self.made, item.worker, made),
            _replaced(self.ended, item.worker, ended),
            _replaced(self.states, item.worker, "" if ended else item.state),
            (item.worker + 1) % len(self.made),
        )

    @property
    def to_make_again(self) -> int:
        """How many batches a restored epoch has to make again: none if there are states."""
        if any(self.states):
            return 0
        return sum(made for made, ended in zip(self.made, self.ended, strict=True) if not ended)

    def to_state(self) -> dict[str, Any]:
        """The JSON-able form."""
        return {
            "made": list(self.made),
            "ended": list(self.ended),
            "states": list(self.states),
            "turn": self.turn,
        }

    @classmethod
    def from_state(cls, state: Any, *, num_workers: int, stateful: bool) -> WorkerProgress:
        """Read what ``to_state`` returned; ``CorruptPositionError`` if it does not fit the layout.

        ``stateful``: the dataset has a state of its own. Whether its iterator has one is known only
        once there is an iterator, so states of a dataset without state are accepted too.
        """
        try:
            made, ended, states = (tuple(state[name]) for name in ("made", "ended", "states"))
            progress = cls(made, ended, states, state["turn"])
            progress._require_sound(max(1, num_workers), stateful)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptPositionError(
                f"the saved state of an iterable dataset is damaged ({error!r})"
            ) from error
        return progress

    def _require_sound(self, count: int, stateful: bool) -> None:
        if {len(self.made), len(self.ended), len(self.states)} != {count}:
            raise ValueError(f"not the state of {count} workers")
        if not all(type(one) is int and one >= 0 for one in self.made):
            raise ValueError(f"made {self.made}")
        if not all(type(one) is bool for one in self.ended):
            raise ValueError(f"ended {self.ended}")
        if type(self.turn) is not int or not 0 <= self.turn < count:
            raise ValueError(f"turn {self.turn}")
        stateful = stateful or any(self.states)
        for made, ended, state in zip(self.made, self.ended, self.states, strict=True):
            if bool(state) != (stateful and made > 0 and not ended):
                raise ValueError(f"{made} batches with state {state!r}")
            if state:
                loads(state)


def is_stateful(source: object) -> bool:
    """Whether ``source``, a dataset or its iterator, has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))


def _replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How a worker makes batches. ``size`` is None for a dataset that yields whole batches.

    ``stateful``: the dataset has a state of its own, so its iterator is not asked for one.
    """

    size: int | None
    drop_last: bool
    collate: Callable[[Any], Any]
    seeding: Seeding
    rank: int
    stateful: bool


class WorkerBatches(Wrapped, IterableDataset[WorkerItem]):
    """The user's dataset, iterated over as worker items from the place set by ``seek``.

    The random generators are seeded for each batch from (seed, epoch, rank, worker, index of the
    batch in the worker), private ones of ``collate_fn`` too. Those of the dataset are seeded at the
    start of an epoch only, alike in every epoch and worker and on every rank: a dataset that
    shuffles before it splits its samples among them relies on that. Without workers, each epoch
    iterates over a deep copy of the dataset: a worker process starts each epoch with a fresh copy
    too, and the results must not differ.
    """

    def __init__(
        self,
        dataset: Any,
        settings: BatchSettings,
        epoch: int = 0,
        progress: WorkerProgress | None = None,
    ) -> None:
        object.__setattr__(self, "_cf_dataset", dataset)
        object.__setattr__(self, "_cf_settings", settings)
        object.__setattr__(self, "_cf_has_warned", False)
        self.seek(epoch, progress or WorkerProgress.fresh(0))

    def seek(self, epoch: int, progress: WorkerProgress) -> None:
        """Let the next ``iter`` continue at ``progress``. Running workers do not see this."""
        object.__setattr__(self, "_cf_start", (epoch, progress))

    def __getattr__(self, name: str) -> Any:
        # Hidden, or torchdata's StatefulDataLoader would find them and save the state as well.
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return super().__getattr__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._cf_dataset, self._cf_settings, *self._cf_start)

    def __iter__(self) -> Iterator[WorkerItem]:
        epoch, progress = self._cf_start
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if not progress.ended[worker]:
            dataset = copy.deepcopy(self._cf_dataset) if info is None else self._cf_dataset
            yield from _WorkerEpoch(dataset, self._cf_settings, epoch, worker).items(progress)
            if info is None:
                self._warn_if_it_counts(dataset)

    def _warn_if_it_counts(self, used: Any) -> None:
        """Warn, once, of a dataset that counts its own epochs: the copy is gone that has."""
        dataset = self._cf_dataset
        if self._cf_has_warned or callable(getattr(dataset, "set_epoch", None)):
            return
        before, after = (getattr(one, "__dict__", {}) for one in (dataset, used))
        for name, value in before.items():
            # Numbers alone: others may be equal and not say so, as copies.
            if "epoch" in name and type(value) is int and after.get(name) != value:
                object.__setattr__(self, "_cf_has_warned", True)
                logger.warning(
                    "%s counts its epochs itself: %s went from %r to %r. Each epoch starts from "
                    "the dataset as the script made it, as in a worker process, so all of them are "
                    "alike. Give it a method set_epoch(epoch), which is called as each begins",
                    type(dataset).__name__, name, value, after.get(name),
                )  # fmt: skip
                return


class _WorkerEpoch:
    """One worker's part of one epoch. ``_source``: the object whose state is saved, if any."""

    def __init__(self, dataset: Any, settings: BatchSettings, epoch: int, worker: int) -> None:
        self._dataset, self._settings = dataset, settings
        self._place = (epoch, settings.rank, worker)
        self._worker = worker
        self._made = 0
        self._source: Any = dataset if settings.stateful else None
        self._own = PrivateGenerators(settings.seeding, dataset=dataset)
        self._of_collate = PrivateGenerators(settings.seeding, collate_fn=settings.collate)
        self._own.look()
        self._of_collate.look()

    def items(self, progress: WorkerProgress) -> Iterator[WorkerItem]:
        samples = self._start(progress.states[self._worker])
        if any(progress.states):
            self._made = progress.made[self._worker]
        else:
            yield from self._make_again(samples, progress)
        if self._worker < progress.turn:
            yield WorkerItem(self._worker, ItemKind.WAITED)
        kind = ItemKind.BATCH
        while kind is ItemKind.BATCH:
            item = self._next_item(samples)
            kind = item.kind
            yield item

    def _start(self, state: str) -> Iterator[Any]:
        """The dataset's iterator, restored to ``state``.

        Seeded with index 0, for what ``iter`` and ``set_epoch`` draw; batches use 1 and above. A
        dataset's state is loaded before ``iter`` (it may decide what to iterate over), the state of
        an iterator after it. A dataset that is its own iterator gets it at both times, because its
        ``__iter__`` may start from the beginning.
        """
        self._settings.seeding.seed_for(*self._place, 0)
        self._own.set(self._settings.seeding.seed)
        set_epoch(self._dataset, self._place[0])
        own = self._settings.stateful
        failure = self._load_before_iter(state) if own and state else None
        samples: Iterator[Any] = iter(self._dataset)
        if not own:
            self._source = samples if is_stateful(samples) else None
        if state and (not own or samples is self._dataset):
            self._load(state)
        elif failure is not None:
            raise failure
        self._own.look(iterator=samples)
        # Whatever loops over a dataset that is its own iterator would begin it anew.
        return iter(samples.__next__, self) if samples is self._dataset else samples

    def _load_before_iter(self, state: str) -> AttributeError | None:
        """Load the dataset's state; return the error, as ``__iter__`` may make what is missing."""
        try:
            self._dataset.load_state_dict(loads(state))
        except AttributeError as error:
            return error
        return None

    def _load(self, state: str) -> None:
        if self._source is None:
            raise NotResumableError(
                f"the iterator of {type(self._dataset).__name__} had state_dict() and "
                "load_state_dict() in the interrupted run, but does not have them now"
            )
        self._source.load_state_dict(loads(state))

    def _make_again(self, samples: Iterator[Any], progress: WorkerProgress) -> Iterator[WorkerItem]:
        """Make this worker's batches again, without collating them if that changes nothing.

        Torch waits for an item from every worker in turn, so all workers must send the same number
        of ``SKIPPED`` items, however many batches each has to make.
        """
        own = progress.made[self._worker]
        rounds = min(_ROUNDS, max(progress.made))
        for index in range(1, rounds + 1):
            count = own * index // rounds - self._made
            for _ in range(count):
                taken = self._next_samples(samples)
                if len(taken) < (self._settings.size or 1):
                    yield WorkerItem(self._worker, ItemKind.TOO_SHORT, self._made)
                    return
                if self._own.shares_with(self._of_collate):
                    self._collated(taken)
                self._made += 1
            yield WorkerItem(self._worker, ItemKind.SKIPPED, count)

    def _next_samples(self, samples: Iterator[Any]) -> list[Any]:
        self._settings.seeding.seed_for(*self._place, self._made + 1)
        return list(islice(samples, self._settings.size or 1))

    def _next_item(self, samples: Iterator[Any]) -> WorkerItem:
        settings, taken = self._settings, self._next_samples(samples)
        partial = len(taken) < (settings.size or 1)
        if not taken or (partial and settings.drop_last):
            return WorkerItem(self._worker, ItemKind.ENDED)
        # A worker that has ended is not started again, so it needs no state. It could not use one
        # either: the state of many datasets at their end is that of their next beginning.
        needs_state = self._source is not None and not partial
        state = dumps(self._source.state_dict()) if needs_state else ""
        unsaved = self._unsaved(state) if state and self._own.found else ""
        data = self._collated(taken)
        self._made += 1
        kind = ItemKind.LAST if partial else ItemKind.BATCH
        return WorkerItem(self._worker, kind, state=state, data=data, unsaved=unsaved)

    def _collated(self, taken: list[Any]) -> Any:
        self._of_collate.set(fold64(self._settings.seeding.seed, *self._place, self._made + 1))
        return self._settings.collate(taken[0] if self._settings.size is None else taken)

    def _unsaved(self, state: str) -> str:
        """How a generator is reached that this batch drew from, unless ``state`` depends on it."""
        if moved := self._own.moved():
            with self._own.disturbed():
                if dumps(self._source.state_dict()) != state:
                    return ""
        return moved
