"""A run in several lives with all ranks in one process, which ``check_lives`` is built on.

``Run`` records what an undisturbed run serves. Life after life it compares that with the samples
that the ranks hand out, and with their merged positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any, TypeAlias

import numpy as np

from iterators.cf_iterator import CFIterator
from iterators.order.ledger import Ledger
from iterators.order.position import Position
from iterators.testing.digest import digest

#: ``(rank, world, batch)`` -> a fresh iterator for that rank; ``batch`` is the size per rank.
MakeRank: TypeAlias = Callable[[int, int, int], CFIterator]

#: Splits a batch into its samples, in their order.
SamplesOf: TypeAlias = Callable[[Any], Sequence[Any]]


class End(Enum):
    """How a life ends."""

    KILLED = "before the boundary of the batch handed out last: that batch is served again"
    CLOSED = "at a boundary: ``finish`` passes the one of the batch handed out last"


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a run, from a start or restart to its end.

    ``world`` ranks with batches of ``batch`` samples each serve up to ``served`` global batches
    (None: all that are left), and then end as ``end`` says.
    """

    world: int
    batch: int
    served: int | None = None
    end: End = End.KILLED


class Run:
    """A run over several lives: the samples it must serve, and how many boundaries cover."""

    def __init__(self, make: MakeRank, epochs: int, samples_of: SamplesOf) -> None:
        self._make, self._samples_of = make, samples_of
        self._whole: list[list[Sample]] = [[] for _ in range(epochs)]
        self._covered, self._handed_out = [0] * epochs, [0] * epochs
        self._state: str | None = None
        self._most_unserved = 0
        self._serve_undisturbed()

    def live(self, life: Life) -> bool:
        """Serve one life, from the last boundary on. True if the run came to its end in it."""
        ranks = self._ranks(life.world, life.batch)
        if ranks.tail != "short":
            self._most_unserved = max(self._most_unserved, life.world * life.batch - 1)
        self._handed_out = list(self._covered)
        ended = self._serve(ranks, life.served)
        step = ranks.step
        merged = ranks.drop(life.end)
        if ranks.step > step:
            self._covered = list(self._handed_out)
        self._require_position(merged)
        self._state = json.dumps(merged.to_dict())
        return ended

    def require_whole(self) -> None:
        """Check that every epoch was served to its end, as far as the tail policy requires."""
        for epoch, whole in enumerate(self._whole):
            left = len(whole) - self._covered[epoch]
            assert left <= self._most_unserved, f"epoch {epoch}: {left} places were not served"

    def _ranks(self, world: int, batch: int) -> Ranks:
        iterators = [self._make(rank, world, batch) for rank in range(world)]
        for one in iterators if self._state else []:
            one.load_state_dict(json.loads(self._state or ""))
        return Ranks(iterators, len(self._whole), self._samples_of)

    def _serve_undisturbed(self) -> None:
        ranks = self._ranks(1, 1)
        while (found := ranks.next_batch()) is not None:
            self._whole[ranks.epoch] += found
        n = ranks.drop(End.CLOSED).identity.n
        for epoch, whole in enumerate(self._whole):
            assert len(whole) == n, f"epoch {epoch}, undisturbed: {len(whole)} samples, not {n}"

    def _serve(self, ranks: Ranks, most: int | None) -> bool:
        for _ in count() if most is None else range(most):
            step = ranks.step
            found = ranks.next_batch()
            if ranks.step > step:
                self._covered = list(self._handed_out)
            if found is None:
                return True
            self._require_samples(ranks, found)
        return False

    def _require_samples(self, ranks: Ranks, found: list[Sample]) -> None:
        epoch = ranks.epoch
        start = self._handed_out[epoch]
        self._handed_out[epoch] = start + len(found)
        expected = self._whole[epoch][start : start + len(found)]
        for place, (one, wanted) in enumerate(zip(found, expected, strict=False), start):
            where = f"epoch {epoch}, place {place}, {ranks}"
            assert one.id == wanted.id, f"{where}: sample {one.id}, not {wanted.id}"
            assert one.digest == wanted.digest, f"{where}: sample {one.id} has different content"
        more = len(found) - len(expected)
        assert not more, f"epoch {epoch}, {ranks}: {more} samples more than the epoch has"

    def _require_position(self, merged: Position) -> None:
        epoch, place = merged.epoch, merged.position
        says = f"the merged position is place {place} of epoch {epoch}"
        covered = self._covered[epoch:]
        fits = covered == [place, *[0] * len(covered)][: len(covered)]
        assert fits, f"{says}, but boundaries cover {self._covered} places of the epochs"
        ids = [one.id for one in self._whole[epoch][:place]] if covered else []
        assert merged.ledger == Ledger.of(ids), f"{says}, but its ledger is not that of the places"


@dataclass(frozen=True, slots=True)
class Sample:
    id: int
    digest: str


class Ranks:
    """All ranks of one layout, in lockstep."""

    def __init__(self, iterators: list[CFIterator], epochs: int, samples_of: SamplesOf) -> None:
        self._iterators, self._samples_of = iterators, samples_of
        self._running = [_batches(one, epochs) for one in iterators]
        position = Position.from_dict(iterators[0].state_dict())
        self.tail, self._batch = position.identity.tail, position.layout.batch

    def __str__(self) -> str:
        return f"world {len(self._iterators)}, batch {self._batch}"

    @property
    def step(self) -> int:
        return self._iterators[0].step

    @property
    def epoch(self) -> int:
        return self._iterators[0].epoch

    def next_batch(self) -> list[Sample] | None:
        """The next global batch in global order, without pads; None at the end."""
        parts = [next(one, _ENDED) for one in self._running]
        ended = [rank for rank, part in enumerate(parts) if part is _ENDED]
        assert len(ended) in (0, len(parts)), f"{self}: only ranks {ended} reached the end"
        return None if ended else self._in_order(parts)

    def drop(self, end: End) -> Position:
        """End this life, and return the merged position that it leaves."""
        if end is End.KILLED:
            merged = self._merged()
        for one in self._running:
            one.close()
        if end is End.CLOSED:
            for iterator in self._iterators:
                iterator.finish()
            merged = self._merged()
        return merged

    def _merged(self) -> Position:
        try:
            merged = self._iterators[0].merged_state([one.state_dict() for one in self._iterators])
        except ValueError as error:
            raise AssertionError(f"{self}: {error}") from error
        assert merged is not None, f"{self}: the ranks do not share the data"
        return Position.from_dict(merged)

    def _in_order(self, parts: list[Any]) -> list[Sample]:
        """The samples in global order: sample ``j`` of rank ``r`` is at place ``r + W * j``."""
        placed: dict[int, Sample] = {}
        for rank, (iterator, part) in enumerate(zip(self._iterators, parts, strict=True)):
            own = _counted_samples(iterator, self._samples_of(part))
            placed |= {rank + len(parts) * index: one for index, one in enumerate(own)}
        return [placed[place] for place in sorted(placed)]


_ENDED = object()


def _batches(iterator: CFIterator, epochs: int) -> Generator[Any, None, None]:
    for _ in iterator.epochs(epochs):
        for _, batch in iterator.enumerate():  # a count from 0 would be looked for in each life
            yield batch


def _counted_samples(iterator: CFIterator, samples: Sequence[Any]) -> list[Sample]:
    ids, weights = iterator.last_ids, iterator.last_weights
    assert ids is not None, "the loader does not say which samples are in a batch"
    counts = np.ones(len(ids)) if weights is None else weights
    sizes = (len(samples), len(ids), len(counts))
    assert len(set(sizes)) == 1, f"{sizes[0]} samples, {sizes[1]} ids, {sizes[2]} weights"
    rows = zip(ids.tolist(), samples, counts, strict=True)
    return [Sample(one, digest(sample)) for one, sample, weight in rows if weight]
