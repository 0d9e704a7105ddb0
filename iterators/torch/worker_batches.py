"""Where the workers of an iterable dataset stand, and what runs inside each of them.

Every worker forms its own batches and sends each with the state behind it; torch hands them out
cyclically, leaving out workers that have ended. So the order is that of (worker, index of the
batch in it), and a ``WorkerProgress`` is all there is to know.

A restored epoch must begin with the worker whose turn it is, but torch always begins with worker
0. The workers before it each send one ``WAITED`` item first, which the training process throws
away: ids, seeds and ``get_worker_info()`` stay torch's own, in every version of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from iterators.errors import CorruptPositionError, NotResumableError
from iterators.order.batch_requests import Seeding, Wrapped
from iterators.torch.encoding import dumps, loads

#: A skipping worker reports progress at most this often.
_ROUNDS = 50


class Kind(Enum):
    """What an item from a worker is; only the first two carry data."""

    BATCH = "a batch"
    LAST = "a batch, and the worker has no more"
    ENDED = "no batch: the worker has no more"
    SKIPPED = "no batch: so many were made again"
    TOO_SHORT = "no batch: the worker ended before it had made as many again as it should"
    WAITED = "no batch: it was not this worker's turn"


class Item(NamedTuple):
    """What a worker sends. ``state`` is text, which pinning leaves alone."""

    worker: int
    kind: Kind
    num_batches: int = 0
    state: str = ""
    data: Any = None


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """For each worker: batches made, whether it has ended, its dataset's state. And the turn.

    ``states`` holds text (of the dataset's state or of its iterator's), empty for a worker that
    has made nothing or has ended, and for all where neither has one.
    """

    made: tuple[int, ...]
    ended: tuple[bool, ...]
    states: tuple[str, ...]
    turn: int = 0

    @classmethod
    def fresh(cls, num_workers: int) -> WorkerProgress:
        """The beginning of an epoch; loading in the training process is one worker."""
        count = max(1, num_workers)
        return cls((0,) * count, (False,) * count, ("",) * count)

    def behind(self, item: Item) -> WorkerProgress:
        """After ``item``, a batch or an end."""
        made = self.made[item.worker] + (item.kind is not Kind.ENDED)
        ended = item.kind is not Kind.BATCH
        return WorkerProgress(
            _replaced(self.made, item.worker, made),
            _replaced(self.ended, item.worker, ended),
            _replaced(self.states, item.worker, "" if ended else item.state),
            (item.worker + 1) % len(self.made),
        )

    @property
    def to_make_again(self) -> int:
        """Batches a restored epoch makes again: none if it has states."""
        return 0 if any(self.states) else self._under_way()

    def _under_way(self) -> int:
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
        """Read ``to_state``'s form; ``CorruptPositionError`` if it cannot be one of this layout.

        ``stateful``: the dataset has a state. Only its iterator knows whether that has one.
        """
        try:
            made, ended, states = (tuple(state[name]) for name in ("made", "ended", "states"))
            standing = cls(made, ended, states, state["turn"])
            standing._require_sound(max(1, num_workers), stateful)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptPositionError(
                f"the saved state of an iterable dataset cannot be read ({error!r})"
            ) from error
        return standing

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
    """Whether a dataset, or its iterator, has a state of its own."""
    return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))


def _replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


@dataclass(frozen=True, slots=True)
class Recipe:
    """How batches are made. ``size`` is None for a dataset that yields ready batches.

    ``stateful``: the dataset has a state, so that of its iterator is not asked for.
    """

    size: int | None
    drop_last: bool
    collate: Callable[[Any], Any]
    seeding: Seeding
    rank: int
    stateful: bool


class WorkerBatches(Wrapped, IterableDataset[Item]):
    """The user's dataset, as items from the place that ``aim`` says.

    The generators are seeded for each batch from (seed, epoch, rank, worker, index of the batch
    in the worker). In the training process a copy of the dataset is used, so that every epoch
    begins with the dataset as it was, as it does in a worker.
    """

    def __init__(
        self, dataset: Any, recipe: Recipe, epoch: int = 0, standing: WorkerProgress | None = None
    ) -> None:
        object.__setattr__(self, "_cf_dataset", dataset)
        object.__setattr__(self, "_cf_recipe", recipe)
        self.aim(epoch, standing or WorkerProgress.fresh(0))

    def aim(self, epoch: int, standing: WorkerProgress) -> None:
        """Let the next ``iter``, in workers not yet started, continue there."""
        object.__setattr__(self, "_cf_aim", (epoch, standing))

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):  # else StatefulDataLoader saves it as well
            raise AttributeError(name)
        return super().__getattr__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._cf_dataset, self._cf_recipe, *self._cf_aim)

    def __iter__(self) -> Iterator[Item]:
        epoch, standing = self._cf_aim
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if not standing.ended[worker]:
            dataset = copy.deepcopy(self._cf_dataset) if info is None else self._cf_dataset
            yield from _Work(dataset, self._cf_recipe, epoch, worker).items(standing)


class _Work:
    """One worker's part of one epoch."""

    def __init__(self, dataset: Any, recipe: Recipe, epoch: int, worker: int) -> None:
        self._dataset, self._recipe = dataset, recipe
        self._place = (epoch, recipe.rank, worker)
        self._worker = worker
        self._made = 0
        self._source: Any = dataset if recipe.stateful else None

    def items(self, standing: WorkerProgress) -> Iterator[Item]:
        samples = self._begun(standing.states[self._worker])
        if any(standing.states):
            self._made = standing.made[self._worker]
        else:
            yield from self._again(samples, standing)
        if self._worker < standing.turn:
            yield Item(self._worker, Kind.WAITED)
        kind = Kind.BATCH
        while kind is Kind.BATCH:
            item = self._next(samples)
            kind = item.kind
            yield item

    def _begun(self, state: str) -> Iterator[Any]:
        """Index 0 of the seeds is what ``iter`` draws."""
        self._recipe.seeding.plant(*self._place, 0)
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(self._place[0])
        if state and self._recipe.stateful:
            self._dataset.load_state_dict(loads(state))
        samples: Iterator[Any] = iter(self._dataset)
        if not self._recipe.stateful:
            self._source = samples if is_stateful(samples) else None
            if state:
                self._load(state)
        return samples

    def _load(self, state: str) -> None:
        if self._source is None:
            raise NotResumableError(
                f"the iterator of {type(self._dataset).__name__} had a state_dict() in the "
                "interrupted run, and has none now"
            )
        self._source.load_state_dict(loads(state))

    def _again(self, samples: Iterator[Any], standing: WorkerProgress) -> Iterator[Item]:
        """Make this worker's batches again, in as many rounds as every other worker."""
        own = standing.made[self._worker]
        rounds = min(_ROUNDS, max(standing.made))
        for index in range(1, rounds + 1):
            count = own * index // rounds - self._made
            for _ in range(count):
                if len(self._taken(samples)) < (self._recipe.size or 1):
                    yield Item(self._worker, Kind.TOO_SHORT, self._made)
                    return
                self._made += 1
            yield Item(self._worker, Kind.SKIPPED, count)

    def _taken(self, samples: Iterator[Any]) -> list[Any]:
        self._recipe.seeding.plant(*self._place, self._made + 1)
        return list(islice(samples, self._recipe.size or 1))

    def _next(self, samples: Iterator[Any]) -> Item:
        recipe, taken = self._recipe, self._taken(samples)
        partial = len(taken) < (recipe.size or 1)
        if not taken or (partial and recipe.drop_last):
            return Item(self._worker, Kind.ENDED)
        # A worker that has ended is not started again, so it needs no state. It could not use
        # it either: behind their end many datasets stand at their next beginning.
        keeps = self._source is not None and not partial
        state = dumps(self._source.state_dict()) if keeps else ""
        data = recipe.collate(taken[0] if recipe.size is None else taken)
        self._made += 1
        return Item(self._worker, Kind.LAST if partial else Kind.BATCH, state=state, data=data)
