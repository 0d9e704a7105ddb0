"""A map-style dataset over shards (tar files, record files) that are best read sequentially.

``ShardOrder`` permutes the shards and interleaves a few of them ("lanes"), one record of each in
turn. Neighbouring samples come from different shards, and every shard is read from its first record
to its last. Like ``EpochOrder`` it is computed on demand at any place, so the dataset resumes at
any layout, with the same checks as any map-style dataset.

A resume reopens the shards of the current place at their records, which costs what ``read`` needs
to get there. Every process has its own readers; they are not inherited by fork or pickle.
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

#: ``read(shard, start)`` iterates over the raw records of one shard from record ``start`` on.
Read: TypeAlias = Callable[[Any, int], Iterable[Any]]


class ShardedDataset(Dataset[Any]):
    """The records of a list of shards, as a map-style dataset that is read sequentially.

    ::

        def read(path, start):
            with open(path, "rb") as file:
                yield from itertools.islice(file, start, None)

        dataset = ShardedDataset(sorted(glob("data/*.txt")), read, decode=tokenize)
        loader = ResumableDataLoader(dataset, 64, shuffle=True, num_workers=8)

    Records are numbered through all shards: the id of a sample is the first id of its shard plus
    its record number in the shard. With ``shuffle=True`` a loader uses ``epoch_order``, which
    interleaves ``lanes`` shards; without it the shards come one after another. Every process reads
    past the records that belong to other ranks and workers, so reading should be cheap compared
    with ``decode``.

    Arguments
        shards: names, paths, or anything else that ``read`` understands.
        read: ``read(shard, start)`` iterates over the raw records of a shard from number ``start``
            on. It should seek if the format allows that, otherwise skip, as above.
        lengths: the number of records in each shard. Default: read every shard once to count.
        names: names of the shards that are the same in every process. Default: the shards
            themselves, if they are strings, paths, integers or tuples of these.
        decode: turns a raw record into a sample. Records that are only skipped are not decoded.
        lanes: number of shards to interleave, at least 1. A different number is a different order,
            so a position saved with one is refused with another.

    Raises ``ValueError`` for ``lengths`` or ``names`` that do not match the shards, and while
    reading if a shard has fewer records than its length says.
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
        """The number of records in each shard. Pass it to the constructor to skip counting."""
        return [int(one) for one in self._lengths]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        shard, record = self._located(index)
        raw = self._readers.record(self._shards[shard], shard, record, int(self._lengths[shard]))
        return raw if self._decode is None else self._decode(raw)

    def epoch_order(self, seed: int, epoch: int) -> ShardOrder:
        """The shuffled order of one epoch, which loaders and samplers use."""
        return ShardOrder(tuple(self.lengths), self._lanes, seed, epoch)

    def data_fingerprint(self) -> str:
        """Identifies the data: the names below their common folder, the lengths and the lanes.

        Raises ``NotResumableError`` for shards whose names differ between processes.
        """
        names = [_lasting_name(one) for one in self._shards] if self._names is None else self._names
        # Not os.path.commonpath, which would turn s3://bucket/a into s3:/bucket/a.
        prefix = os.path.commonprefix(names).rpartition("/")[0]  # noqa: RUF071
        content = [f"{name.removeprefix(prefix)}\0" for name in names]
        digest = blake2b("".join(content).encode(errors="surrogateescape"), digest_size=8)
        digest.update(self._lengths.astype("<i8").tobytes())
        return f"{type(self).__qualname__}:{len(self)}:{self._lanes}:{digest.hexdigest()}"

    def sample_name(self, index: int) -> str:
        """The shard and the record number of the sample with this id."""
        shard, record = self._located(index)
        return f"{(self._names or self._shards)[shard]}, record {record}"

    def _located(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"expected an id in [0, {len(self)}), got {index}")
        shard = int(np.searchsorted(self._stops, index, side="right"))
        return shard, index - int(self._stops[shard] - self._lengths[shard])


def _lasting_name(shard: Any) -> str:
    """The same text in every process; ``str()`` of any object may contain its address."""
    if isinstance(shard, (str, bytes, os.PathLike)):
        return os.fsdecode(shard)
    if isinstance(shard, Integral):
        return str(int(shard))
    if isinstance(shard, tuple):
        return str(tuple(_lasting_name(one) for one in shard))
    raise NotResumableError(
        f"a shard that is a {type(shard).__name__} has no name that is the same in every process, "
        "so its data cannot be recognised on a restore. Give ShardedDataset names=[...], or the "
        "loader a fingerprint='...'"
    )


def _counted(shards: list[Any], read: Read) -> list[int]:
    began = time.monotonic()
    counts = [_length(read, shard) for shard in shards]
    logger.info(
        "counted %d records in %d shards in %.1f s; lengths=dataset.lengths skips this next time",
        sum(counts),
        len(shards),
        time.monotonic() - began,
    )
    return counts


def _length(read: Read, shard: Any) -> int:
    return sum(1 for _ in read(shard, 0))


class _Readers:
    """The shards that this process has open, each at a record.

    At most ``at_once`` of them; the least recently used one is closed. Twice the number of lanes
    is enough: consecutive samples need one reader per lane, and a lane changes shards.
    """

    def __init__(self, read: Read, *, at_once: int) -> None:
        self._read, self._at_once = read, at_once
        self._forget()

    def record(self, name: Any, shard: int, record: int, length: int) -> Any:
        """One raw record. Reads on to a later record; reopens the shard for an earlier one."""
        # A forked child shares its parent's open files, and reading would move the parent's place.
        if self._pid != os.getpid():
            self._forget()
        records, next_record = self._open.pop(shard, (None, 0))
        if records is None or record < next_record:
            _close(records)
            records, next_record = iter(self._read(name, record)), record
        for _ in range(record - next_record + 1):
            try:
                raw = next(records)
            except StopIteration:
                raise ValueError(
                    f"shard {name} has {_length(self._read, name)} records, but its length is "
                    f"given as {length}: count again (lengths=None), or restore the shard"
                ) from None
        self._keep(shard, records, record + 1, length)
        return raw

    def _keep(self, shard: int, records: Iterator[Any], next_record: int, length: int) -> None:
        if next_record == length:
            _close(records)
            return
        self._open[shard] = (records, next_record)
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

    The permuted shards are assigned one by one to whichever lane is shortest so far. Round ``j``
    takes record ``j`` of every lane that is longer than ``j``. Lanes are sorted by length, longest
    first, so the lanes of a round are always the first few, and both directions are a few binary
    searches. Memory is proportional to the number of shards.
    """

    lengths: tuple[int, ...]
    lanes: int
    seed: int
    epoch: int
    n: int = field(init=False, repr=False, compare=False)
    #: By shard: its first id, and its index in ``_shards``.
    _first: Int64 = field(init=False, repr=False, compare=False)
    _index: Int64 = field(init=False, repr=False, compare=False)
    #: By index in reading order, lane after lane: the shard, where it begins in the list of all
    #: lanes' records, and its lane.
    _shards: Int64 = field(init=False, repr=False, compare=False)
    _begins: Int64 = field(init=False, repr=False, compare=False)
    _lane: Int64 = field(init=False, repr=False, compare=False)
    #: By lane: where it begins in that list.
    _bases: Int64 = field(init=False, repr=False, compare=False)
    #: By stretch of rounds with the same lanes: its first round, its first place, its lanes.
    _rounds: Int64 = field(init=False, repr=False, compare=False)
    _places: Int64 = field(init=False, repr=False, compare=False)
    _active: Int64 = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = np.array(self.lengths, dtype=np.int64)
        by_lane = _shards_by_lane(self.lengths, self.lanes, self.seed, self.epoch)
        totals = np.array([lengths[lane].sum() for lane in by_lane], dtype=np.int64)
        shards = np.concatenate(by_lane)
        rounds = np.unique(np.concatenate([[0], totals]))
        active = len(by_lane) - np.searchsorted(totals[::-1], rounds, side="right")
        steps = np.diff(rounds) * active[:-1]
        parts = {
            "n": int(lengths.sum()),
            "_index": np.argsort(shards),
            "_first": np.cumsum(lengths) - lengths,
            "_shards": shards,
            "_begins": np.cumsum(lengths[shards]) - lengths[shards],
            "_lane": np.repeat(np.arange(len(by_lane)), [len(lane) for lane in by_lane]),
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
        # Where several shards begin at the same record, all but the last are empty: side="right".
        index = np.searchsorted(self._begins, at, side="right") - 1
        ids: Int64 = self._first[self._shards[index]] + at - self._begins[index]
        return ids

    def positions(self, ids: ArrayLike, /) -> Int64:
        """The inverse: the places of the samples ``ids``, ``[N] int64``."""
        samples = SequentialOrder(self.n).ids(ids)
        shard = np.searchsorted(self._first, samples, side="right") - 1
        index = self._index[shard]
        lane = self._lane[index]
        at = self._begins[index] + samples - self._first[shard] - self._bases[lane]
        part = np.searchsorted(self._rounds, at, side="right") - 1
        places: Int64 = self._places[part] + (at - self._rounds[part]) * self._active[part] + lane
        return places


def _shards_by_lane(lengths: Sequence[int], lanes: int, seed: int, epoch: int) -> list[Int64]:
    """The shards of each lane in reading order, the longest lane first."""
    by_lane: list[list[int]] = [[] for _ in range(lanes)]
    shortest = [(0, lane) for lane in range(lanes)]
    heapify(shortest)
    for shard in EpochOrder(len(lengths), seed, epoch).ids(range(len(lengths))).tolist():
        total, lane = shortest[0]
        by_lane[lane].append(shard)
        heapreplace(shortest, (total + lengths[shard], lane))
    by_length = sorted((-total, lane) for total, lane in shortest)
    return [np.array(by_lane[lane], dtype=np.int64) for _, lane in by_length]
