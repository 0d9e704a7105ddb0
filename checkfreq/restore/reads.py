"""Which reads it takes to get tensors out of a payload file, and what is checked in each. Pure.

What has a digest is a *run*: the header, or a piece of a tensor. A run is read whole or not at
all. Runs up to the size of a read are read together with their neighbours; a longer one (the
formats before version 3 have one digest for a tensor of any size) is a task by itself, for one
thread. No torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from checkfreq.store.digests import pieces_of
from checkfreq.store.manifest import FileEntry, TensorEntry
from checkfreq.types import PAGE_BYTES

Range = tuple[int, int]


class Target(Protocol):
    """Where the bytes of a tensor go. Called by several threads, for ranges that do not overlap."""

    def put(self, start: int, data: memoryview) -> Callable[[], None] | None:
        """Take the tensor's bytes from byte ``start`` on.

        ``data`` is valid until this returns; or, if it returns a function, until that has been
        called, which waits until the bytes have been copied.
        """


@dataclass(frozen=True, slots=True)
class Wanted:
    """One tensor of a file, and where its bytes go.

    ``target``: None to verify only. ``ranges``: byte ranges (start, end) within the tensor,
    ascending and apart; None for all of it. Only the pieces that meet one of them are read.
    """

    file: FileEntry
    tensor: TensorEntry
    target: Target | None
    ranges: tuple[Range, ...] | None = None


class Sink(NamedTuple):
    """A target, where its tensor begins in the file, and the ranges of the file that it takes.

    ``ranges``: None for all of the tensor.
    """

    target: Target
    origin: int
    ranges: tuple[Range, ...] | None

    def overlaps(self, start: int, end: int) -> Iterator[Range]:
        """What the target takes of the bytes from ``start`` to ``end`` of the file."""
        if self.ranges is None:
            yield start, end
            return
        for index in range(first_ending_after(self.ranges, start), len(self.ranges)):
            begin, stop = self.ranges[index]
            if begin >= end:
                return
            yield max(begin, start), min(stop, end)


class Run(NamedTuple):  # a tuple, since there may be a million
    """Bytes of a file that have one digest. ``tensor``: None for the header."""

    start: int
    end: int
    digest: str
    tensor: TensorEntry | None
    sinks: Sequence[Sink]

    @property
    def name(self) -> str:
        """What it is, for messages."""
        if self.tensor is None:
            return "header"
        begin, num_bytes = self.start - self.tensor.offset, self.end - self.start
        if num_bytes == self.tensor.num_bytes:
            return f"tensor {self.tensor.name}"
        return f"tensor {self.tensor.name}, bytes {begin} to {begin + num_bytes}"


class Task(NamedTuple):
    """Neighbouring runs that one thread reads together, or a single long one."""

    runs: list[Run]

    @property
    def start(self) -> int:
        """Where its first run begins in the file."""
        return self.runs[0].start

    @property
    def end(self) -> int:
        """Where its last run ends."""
        return self.runs[-1].end


def first_ending_after(ranges: Sequence[Range], start: int) -> int:
    """The number of the first of ascending ranges that ends after ``start``."""
    return bisect_right(ranges, start, key=lambda item: item[1])


def tasks_of(
    file: FileEntry,
    wanted: Sequence[Wanted],
    *,
    read_bytes: int,
    borders: Sequence[int] = (),
    with_header: bool = True,
) -> list[Task]:
    """The tasks that read what is wanted of a file, in file order.

    ``borders``: offsets, ascending, that no task crosses. A tensor that is wanted twice is read
    once.
    """
    runs = [Run(0, file.header_bytes, file.header_digest, None, ())] if with_header else []
    by_place: dict[tuple[int, int, str], list[Wanted]] = {}
    for item in wanted:
        tensor = item.tensor
        by_place.setdefault((tensor.offset, tensor.num_bytes, tensor.name), []).append(item)
    for _, items in sorted(by_place.items()):
        runs += _runs(items)
    return list(_grouped(runs, read_bytes, borders))


def _runs(items: Sequence[Wanted]) -> Iterator[Run]:
    """The runs of one tensor that any of ``items`` wants."""
    tensor = items[0].tensor
    sinks = [_sink(item) for item in items if item.target is not None]
    is_whole = any(item.ranges is None for item in items)
    for begin, end, digest in pieces_of(tensor):
        if is_whole or any(_meets(item.ranges or (), begin, end) for item in items):
            yield Run(tensor.offset + begin, tensor.offset + end, digest, tensor, sinks)


def _meets(ranges: Sequence[Range], begin: int, end: int) -> bool:
    """Whether any of the ranges has a byte from ``begin`` to ``end``."""
    index = first_ending_after(ranges, begin)
    return index < len(ranges) and ranges[index][0] < end


def _sink(item: Wanted) -> Sink:
    assert item.target is not None
    origin = item.tensor.offset
    ranges = item.ranges
    if ranges is None:
        return Sink(item.target, origin, None)
    return Sink(item.target, origin, tuple((origin + begin, origin + end) for begin, end in ranges))


def _grouped(runs: Sequence[Run], read_bytes: int, borders: Sequence[int]) -> Iterator[Task]:
    group: list[Run] = []
    limit = 0
    for run in runs:
        if group and (run.end > limit or run.start - group[-1].end >= PAGE_BYTES):
            yield Task(group)
            group = []
        if not group:
            limit = min(run.start + read_bytes, _next_border(borders, run.start))
        group.append(run)
    if group:
        yield Task(group)


def _next_border(borders: Sequence[int], start: int) -> int:
    index = bisect_right(borders, start)
    return borders[index] if index < len(borders) else _NO_BORDER


_NO_BORDER = 2**63
