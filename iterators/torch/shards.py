"""Shards that are read sequentially, as a map-style dataset with a shuffled order of its own.

``ShardOrder`` permutes the shards and runs through a few of them side by side ("lanes"), one
record of each in turn: neighbours come from different shards, and every shard is read from its
first record to its last. It is a closed form like ``EpochOrder``, so the dataset is resumed at
any layout, with the ledger and the audit of every map-style dataset.

A resume opens the shards of the current place at their records, at the cost of what ``read``
takes to get there. Each process keeps its own readers, which are not shared by fork or pickle.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heapify, heapreplace
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Dataset

from iterators.errors import NotResumableError
from iterators.order.epoch import EpochOrder, Int64, SequentialOrder

logger = logging.getLogger(__name__)

#: ``read(shard, start)``: the raw records of one shard, in order, from record ``start`` on.
Read: TypeAlias = Callable[[Any, int], Iterable[Any]]


class ShardedDataset(Dataset[Any]):
    """The records of ``shards``, which are names, paths, or whatever ``read`` understands.

    ``read(shard, start)`` iterates over a shard's raw records from number ``start`` on, by
    seeking if the format can, else by ``itertools.islice(records, start, None)``. ``decode``
    turns a raw record into a sample; records that only lie on the way are not decoded. ``lengths``
    are the record counts; without them every shard is read once to count. ``names`` say what the
    data is: by default the shards themselves, if they are texts, paths, integers or tuples of
    such. A sample's id is the first id of its shard plus its record number.

    With ``shuffle=True`` a loader takes ``epoch_order``, over ``lanes`` shards at a time; without,
    the shards come one after another. Every process of a run reads over the records that are
    another's. Raises ``ValueError`` when a shard turns out to have fewer records than counted.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Read,
        *,
        lengths: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
        decode: Callable[[Any], Any] | None = None,
        lanes: int = 8,
    ) -> None:
        if lanes < 1:
            raise ValueError(f"lanes must be at least 1, got {lanes}")
        self._shards, self._decode = list(shards), decode
        counts = _counted(self._shards, read) if lengths is None else list(lengths)
        if len(counts) != len(self._shards) or min(counts, default=0) < 0:
            raise ValueError(f"{len(self._shards)} shards need as many lengths, none negative")
        self._names = None if names is None else list(names)
        if self._names is not None and len(self._names) != len(self._shards):
            raise ValueError(f"{len(self._shards)} shards need as many names")
        self._lengths = np.array(counts, dtype=np.int64)
        self._stops = np.cumsum(self._lengths)
        self._size = sum(counts)
        self._lanes = max(1, min(lanes, len(self._shards)))
        self._readers = _Readers(read, at_once=2 * self._lanes)

    @property
    def lengths(self) -> list[int]:
        """Records in each shard: give them to the constructor to save the counting."""
        return [int(one) for one in self._lengths]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        shard, record = self._located(index)
        raw = self._readers.record(self._shards[shard], shard, record, int(self._lengths[shard]))
        return raw if self._decode is None else self._decode(raw)

    def epoch_order(self, seed: int, epoch: int) -> ShardOrder:
        """The shuffled order of one epoch."""
        return ShardOrder(tuple(self.lengths), self._lanes, seed, epoch)

    def data_fingerprint(self) -> str:
        """What must agree on a restore: names below their common folder, lengths, lanes.

        Raises ``NotResumableError`` for shards that have no lasting names.
        """
        names = [_lasting_name(one) for one in self._shards] if self._names is None else self._names
        # Character by character, so that addresses like s3://bucket/a keep their two slashes.
        prefix = os.path.commonprefix(names).rpartition("/")[0]  # noqa: RUF071
        content = [f"{name.removeprefix(prefix)}\0" for name in names]
        digest = blake2b("".join(content).encode(errors="surrogateescape"), digest_size=8)
        digest.update(self._lengths.astype("<i8").tobytes())
        return f"{type(self).__qualname__}:{len(self)}:{self._lanes}:{digest.hexdigest()}"

    def sample_name(self, index: int) -> str:
        """Shard and record number."""
        shard, record = self._located(index)
        return f"{(self._names or self._shards)[shard]}, record {record}"

    def _located(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"expected an id in [0, {len(self)}), got {index}")
        shard = int(np.searchsorted(self._stops, index, side="right"))
        return shard, index - int(self._stops[shard] - self._lengths[shard])


def _lasting_name(shard: Any) -> str:
    """The same in every process: an object's own text may hold its address."""
    if isinstance(shard, (str, bytes, os.PathLike)):
        return os.fsdecode(shard)
    if isinstance(shard, Integral):
        return str(int(shard))
    if isinstance(shard, tuple):
        return str(tuple(_lasting_name(one) for one in shard))
    raise NotResumableError(
        f"a shard that is a {type(shard).__name__} has no name that lasts from one process to the "
        "next, so its data cannot be recognised on a restore. Give ShardedDataset names=[...], or "
        "the loader a fingerprint='...'"
    )


def _counted(shards: list[Any], read: Read) -> list[int]:
    began = time.monotonic()
    counts = [_length(read, shard) for shard in shards]
    logger.info(
        "counted %d records in %d shards, which took %.1f s; lengths=dataset.lengths saves it",
        sum(counts),
        len(shards),
        time.monotonic() - began,
    )
    return counts


def _length(read: Read, shard: Any) -> int:
    return sum(1 for _ in read(shard, 0))


class _Readers:
    """Open shards of this process, each at a record; the least recently used one is closed."""

    def __init__(self, read: Read, *, at_once: int) -> None:
        self._read, self._at_once = read, at_once
        self._forget()

    def record(self, name: Any, shard: int, record: int, length: int) -> Any:
        """One raw record: forwards by reading on, backwards by opening anew."""
        if self._pid != os.getpid():  # a forked process must not move its parent's files
            self._forget()
        records, behind = self._open.pop(shard, (None, 0))
        if records is None or record < behind:
            _close(records)
            records, behind = iter(self._read(name, record)), record
        for _ in range(record - behind + 1):
            try:
                raw = next(records)
            except StopIteration:
                raise ValueError(
                    f"shard {name} has {_length(self._read, name)} records, but {length} were "
                    "counted: count again (lengths=None), or restore the shard"
                ) from None
        self._keep(shard, records, record + 1, length)
        return raw

    def _keep(self, shard: int, records: Iterator[Any], behind: int, length: int) -> None:
        if behind == length:
            _close(records)
            return
        self._open[shard] = (records, behind)
        if len(self._open) > self._at_once:
            _close(self._open.popitem(last=False)[1][0])

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._open: OrderedDict[int, tuple[Iterator[Any], int]] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_readers, (self._read, self._at_once)


def _new_readers(read: Read, at_once: int) -> _Readers:
    return _Readers(read, at_once=at_once)


def _close(records: Iterator[Any] | None) -> None:
    close = getattr(records, "close", None)
    if callable(close):
        close()


@dataclass(frozen=True)
class ShardOrder:
    """One epoch's order of the records of shards with these ``lengths``.

    The shards, permuted, are dealt out one by one to whichever of the ``lanes`` is shortest.
    Round ``j`` takes the ``j``-th record of every lane that is longer than ``j``, longest lane
    first, so the lanes of a round are always the first few. Memory is that of the shard list.
    """

    lengths: tuple[int, ...]
    lanes: int
    seed: int
    epoch: int
    n: int = field(init=False, repr=False, compare=False)
    _first: Int64 = field(init=False, repr=False, compare=False)
    _dealt: Int64 = field(init=False, repr=False, compare=False)
    _shards: Int64 = field(init=False, repr=False, compare=False)
    _begins: Int64 = field(init=False, repr=False, compare=False)
    _rank: Int64 = field(init=False, repr=False, compare=False)
    _bases: Int64 = field(init=False, repr=False, compare=False)
    _rounds: Int64 = field(init=False, repr=False, compare=False)
    _places: Int64 = field(init=False, repr=False, compare=False)
    _active: Int64 = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = np.array(self.lengths, dtype=np.int64)
        dealt = _dealt(self.lengths, self.lanes, self.seed, self.epoch)
        totals = np.array([lengths[lane].sum() for lane in dealt], dtype=np.int64)
        # Lane by lane, one long list of records; `_rank` says which lane a shard of it is in.
        shards = np.concatenate(dealt)
        rounds = np.unique(np.concatenate([[0], totals]))
        active = len(dealt) - np.searchsorted(totals[::-1], rounds, side="right")
        steps = np.diff(rounds) * active[:-1]
        parts = {
            "n": int(lengths.sum()),
            "_dealt": np.argsort(shards),
            "_first": np.cumsum(lengths) - lengths,
            "_shards": shards,
            "_begins": np.cumsum(lengths[shards]) - lengths[shards],
            "_rank": np.repeat(np.arange(len(dealt)), [len(lane) for lane in dealt]),
            "_bases": np.cumsum(totals) - totals,
            "_rounds": rounds[:-1],
            "_places": np.cumsum(steps) - steps,
            "_active": active[:-1],
        }
        for name, part in parts.items():
            object.__setattr__(self, name, part)

    @property
    def algorithm(self) -> str:
        """The name saved with a position."""
        return "shards-1"

    def ids(self, positions: ArrayLike, /) -> Int64:
        """The samples at ``positions``, ``[N] int64``."""
        places = SequentialOrder(self.n).ids(positions)
        part = np.searchsorted(self._places, places, side="right") - 1
        rounds, lane = np.divmod(places - self._places[part], self._active[part])
        at = self._bases[lane] + self._rounds[part] + rounds
        # Of shards that begin at the same record all but the last are empty.
        dealt = np.searchsorted(self._begins, at, side="right") - 1
        ids: Int64 = self._first[self._shards[dealt]] + at - self._begins[dealt]
        return ids

    def positions(self, ids: ArrayLike, /) -> Int64:
        """The inverse: the places of the samples ``ids``, ``[N] int64``."""
        samples = SequentialOrder(self.n).ids(ids)
        shard = np.searchsorted(self._first, samples, side="right") - 1
        dealt = self._dealt[shard]
        lane = self._rank[dealt]
        at = self._begins[dealt] + samples - self._first[shard] - self._bases[lane]
        part = np.searchsorted(self._rounds, at, side="right") - 1
        places: Int64 = self._places[part] + (at - self._rounds[part]) * self._active[part] + lane
        return places


def _dealt(lengths: Sequence[int], lanes: int, seed: int, epoch: int) -> list[Int64]:
    """The shards of each lane, in reading order; the longest lane first."""
    dealt: list[list[int]] = [[] for _ in range(lanes)]
    shortest = [(0, lane) for lane in range(lanes)]
    heapify(shortest)
    for shard in EpochOrder(len(lengths), seed, epoch).ids(range(len(lengths))).tolist():
        total, lane = shortest[0]
        dealt[lane].append(shard)
        heapreplace(shortest, (total + lengths[shard], lane))
    by_length = sorted((-total, lane) for total, lane in shortest)
    return [np.array(dealt[lane], dtype=np.int64) for _, lane in by_length]
