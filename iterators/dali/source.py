"""The source that feeds a DALI pipeline with this rank's batches, from any place on.

``IndexedSource`` is the callable under ``fn.external_source``. DALI calls it ahead of training, as
far as the pipeline prefetches, so it keeps a record of each batch that it produced; the adapter
takes one record per delivered batch. All of it runs on the thread that drives the pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from iterators.dali.files import FileList
from iterators.order.batch_requests import Share
from iterators.order.epoch import EpochOrder, Int64, Order, SequentialOrder, fold64, mix64

Float32: TypeAlias = NDArray[np.float32]

#: The outputs that may follow the encoded bytes of a sample.
OUTPUTS = ("label", "uniforms", "id", "weight")

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class BatchStart(NamedTuple):
    """Where a batch begins: ``place`` of ``epoch``, with the order and randomness of ``seed``."""

    seed: int
    epoch: int
    place: int


class Record(NamedTuple):
    """One batch that was produced; ``end`` is the place behind it, over all ranks."""

    begin: BatchStart
    end: int
    ids: Int64
    weights: Float32


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """What a source produces: ``outputs`` of ``files``, with ``num_uniforms`` per sample.

    ``native_random``: the user accepts that DALI's own random numbers do not resume.
    """

    files: FileList
    fingerprint: str
    shuffle: bool = True
    num_uniforms: int = 0
    outputs: tuple[str, ...] = ("label",)
    native_random: bool = False

    def order(self, seed: int, epoch: int) -> Order:
        """The global order of an epoch."""
        n = len(self.files)
        return EpochOrder(n, seed, epoch) if self.shuffle else SequentialOrder(n)

    def batch(self, record: Record) -> list[Any]:
        """The paths and the outputs, as ``fn.external_source`` takes a batch."""
        paths = [self.files.path(index) for index in record.ids.tolist()]
        return [paths, *(self.output(name, record) for name in self.outputs)]

    def output(self, name: str, record: Record) -> NDArray[Any]:
        """One of ``OUTPUTS`` for a batch, ``[N, K]``."""
        if name == "uniforms":
            return uniforms(record.begin, record.ids, self.num_uniforms)
        if name == "weight":
            return record.weights[:, None]
        one_each = self.files.labels[record.ids] if name == "label" else record.ids
        return one_each[:, None]


class IndexedSource:
    """Feeds one pipeline with epoch after epoch, each followed by the end that DALI expects.

    With ``endless`` there is no end, so that the pipeline never runs empty between two epochs. The
    adapter that sets it counts the batches itself, and marks itself as ``owner``. ``origin`` is
    (epoch, place). ``seed`` None stands for ``default_seed``, until ``seek`` sets a different one.
    Records of the last ``remembered`` batches are kept: more than DALI ever prefetches.
    """

    endless = False
    owner: object = None
    _next: BatchStart
    _records: Iterator[Record]

    def __init__(
        self,
        spec: SourceSpec,
        share: Share,
        *,
        seed: int | None,
        default_seed: int = 0,
        origin: tuple[int, int],
        remembered: int | None = None,
    ) -> None:
        self.spec, self.share, self.seed, self.origin = spec, share, seed, origin
        self._produced: deque[Record] = deque(maxlen=remembered)
        #: The seed until the first ``seek``.
        self.first_seed = default_seed if seed is None else seed
        self.seek(BatchStart(self.first_seed, *origin))
        if not share.batches(len(spec.files) - origin[1]):
            self.seek(BatchStart(self.first_seed, origin[0] + 1, 0))

    @property
    def front(self) -> BatchStart:
        """The start of the next batch that the pipeline will deliver."""
        return self._produced[0].begin if self._produced else self._next

    @property
    def num_produced(self) -> int:
        """Number of batches produced and not yet taken."""
        return len(self._produced)

    def ids_in_front(self, num_batches: int) -> list[int]:
        """The samples of the oldest batches not yet taken."""
        return [
            one for record in islice(self._produced, num_batches) for one in record.ids.tolist()
        ]

    def seek(self, begin: BatchStart) -> None:
        """Produce from ``begin`` on. Batches produced before stay in the pipeline."""
        self._next = begin
        self._records = records(self.spec.order(begin.seed, begin.epoch), self.share, begin)

    def take(self) -> Record:
        """The oldest record. Call it once per batch that left the pipeline."""
        return self._produced.popleft()

    def __call__(self, _batch: object) -> list[Any]:
        record = next(self._records, None)
        if record is None:
            self.seek(BatchStart(self._next.seed, self._next.epoch + 1, 0))
            if not self.endless:
                raise StopIteration
            record = next(self._records)
        self._produced.append(record)
        self._next = record.begin._replace(place=record.end)
        return self.spec.batch(record)


def records(order: Order, share: Share, begin: BatchStart) -> Iterator[Record]:
    """This rank's batches from ``begin`` to the end of the epoch, the same as torch loaders get."""
    for first, ids, weight in share.cut(order, begin.place):
        yield Record(
            begin._replace(place=first),
            min(first + share.global_batch, order.n),
            np.array(ids, dtype=np.int64),
            np.full(len(ids), weight, dtype=np.float32),
        )


def uniforms(begin: BatchStart, ids: Int64, count: int) -> Float32:
    """``[N, count] float32`` in [0, 1), from (seed, epoch, id, k) alone.

    24 random bits each, all that a float32 below 1 can hold: the result is the same everywhere.
    """
    key = np.uint64(fold64(begin.seed, begin.epoch))
    samples = mix64(ids.astype(np.uint64) * _GOLDEN + key)
    columns = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    bits = mix64(samples[:, None] + columns) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2.0**-24)
