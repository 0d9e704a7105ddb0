"""Which ranks hold shards that overlap a region, from an index whose size hardly grows with them.

A shard is *cut* along the dimensions that it is not the whole of. Tensors whose cut dimensions have
the same sizes are cut alike on most meshes, so a rank's thousand shards have a handful of distinct
cuts, and from rank to rank their offsets grow by a constant: such ranks make one *run*. The index
has no names: what it finds may hold other tensors only, which the rank's own part then tells. It
misses no rank. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from checkfreq.store.boxes import Box
from checkfreq.store.checks import ManifestError, is_count, require
from checkfreq.types import Json

#: (dimension, size of the whole tensor along it) for each dimension that is cut, ascending.
Dims = tuple[tuple[int, int], ...]


class Cut(NamedTuple):
    """Where a shard lies along the dimensions that it is not the whole of."""

    dims: Dims
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def from_json(cls, value: Json) -> Cut:
        """ManifestError for what is none."""
        dims, offsets, sizes = _row(value, 3)
        cut = cls(_dims(dims), _row(offsets, len(dims)), _row(sizes, len(dims)))
        require(_are_counts(cut.offsets + cut.sizes), "cut", "whole numbers", value)
        return cut


class Run(NamedTuple):
    """Cuts of the ranks ``rank``, ``rank + stride``, ...: so many, of the same sizes."""

    rank: int
    stride: int
    num_ranks: int
    offsets: tuple[int, ...]
    steps: tuple[int, ...]
    sizes: tuple[int, ...]


def cut_of(shape: Sequence[int], box: Box) -> Cut:
    """How a shard is cut from a tensor of that shape."""
    cut = [
        (dim, length, offset, size)
        for dim, (length, offset, size) in enumerate(zip(shape, *box, strict=True))
        if size != length
    ]
    return Cut(
        tuple((dim, length) for dim, length, _, _ in cut),
        tuple(offset for _, _, offset, _ in cut),
        tuple(size for _, _, _, size in cut),
    )


def cuts_of(shards: Iterable[tuple[Sequence[int], Box]]) -> list[Cut]:
    """The distinct cuts of shards, each with its tensor's shape; empty ones have none."""
    return sorted({cut_of(shape, box) for shape, box in shards if box.num_elements})


@dataclass(frozen=True, slots=True)
class CutIndex:
    """The cuts of all ranks, in runs."""

    runs: Mapping[Dims, tuple[Run, ...]]

    @classmethod
    def of(cls, cuts: Mapping[int, Iterable[Cut]]) -> CutIndex:
        """The index of each rank's cuts."""
        by_dims: dict[Dims, dict[tuple[int, ...], list[tuple[int, Cut]]]] = {}
        for rank, own in sorted(cuts.items()):
            for cut in own:
                alike = by_dims.setdefault(cut.dims, {}).setdefault(cut.sizes, [])
                alike.append((rank, cut))
        return cls(
            {
                dims: tuple(run for alike in by_sizes.values() for run in _runs(alike))
                for dims, by_sizes in sorted(by_dims.items())
            }
        )

    def to_json(self) -> list[Json]:
        """As it stands in the root of a tree: the dimensions, and their runs."""
        return [[dims, runs] for dims, runs in self.runs.items()]

    @classmethod
    def from_json(cls, value: Json, *, ranks: Collection[int]) -> CutIndex:
        """ManifestError for what is none, or has more than these ranks."""
        pairs = [_row(pair, 2) for pair in _row(value)]
        found = {
            _dims(dims): tuple(_run(one, len(dims), ranks) for one in _row(runs))
            for dims, runs in pairs
        }
        require(len(found) == len(pairs), "cuts", "each dimensions once", value)
        return cls(found)

    def ranks(self, shape: Sequence[int], box: Box) -> set[int]:
        """The ranks whose shards may overlap a box of a tensor of that shape."""
        if not box.num_elements:
            return set()
        return {
            rank
            for dims, runs in self.runs.items()
            if all(dim < len(shape) and shape[dim] == length for dim, length in dims)
            for rank in _overlapping(
                runs,
                [box.offsets[dim] for dim, _ in dims],
                [box.sizes[dim] for dim, _ in dims],
            )
        }


def _runs(cuts: Sequence[tuple[int, Cut]]) -> list[Run]:
    """Cuts of the same dimensions and sizes, in the order of their ranks, as runs."""
    found: list[Run] = []
    open_at: dict[tuple[int, tuple[int, ...]], int] = {}  # (next rank, its offsets): which run
    begun: dict[int, list[int]] = {}  # a rank: the runs that began there and have no step yet
    for rank, cut in cuts:
        number = open_at.pop((rank, cut.offsets), None)
        if number is None:
            number = _second(found, begun, rank, cut)
        if number is None:
            begun.setdefault(rank, []).append(len(found))
            found.append(Run(rank, 1, 1, cut.offsets, (0,) * len(cut.offsets), cut.sizes))
            continue
        run = found[number] = _longer(found[number], rank, cut)
        offsets = tuple(
            offset + step * run.num_ranks
            for offset, step in zip(run.offsets, run.steps, strict=True)
        )
        open_at[run.rank + run.stride * run.num_ranks, offsets] = number
    return found


def _second(found: Sequence[Run], begun: dict[int, list[int]], rank: int, cut: Cut) -> int | None:
    """The run of one rank that this cut goes on with: of the rank before, if there is one."""
    before = max((one for one in begun if one < rank), default=None)
    if before is None:
        return None
    number = begun[before].pop(0)
    if not begun[before]:
        del begun[before]
    return number


def _longer(run: Run, rank: int, cut: Cut) -> Run:
    if run.num_ranks > 1:
        return run._replace(num_ranks=run.num_ranks + 1)
    steps = tuple(now - before for now, before in zip(cut.offsets, run.offsets, strict=True))
    return run._replace(stride=rank - run.rank, num_ranks=2, steps=steps)


def _overlapping(
    runs: Iterable[Run], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[int]:
    for run in runs:
        first, end = 0, run.num_ranks
        for at, size, offset, step, length in zip(
            offsets, sizes, run.offsets, run.steps, run.sizes, strict=True
        ):
            low, high = _between(at - length + 1 - offset, at + size - 1 - offset, step, end)
            first, end = max(first, low), min(end, high)
        yield from (run.rank + number * run.stride for number in range(first, end))


def _between(least: int, most: int, step: int, count: int) -> tuple[int, int]:
    """The numbers from 0 to ``count`` (not included) whose multiple of ``step`` is in between."""
    if step == 0:
        return (0, count) if least <= 0 <= most else (0, 0)
    if step < 0:
        least, most, step = -most, -least, -step
    return max(-(-least // step), 0), min(most // step + 1, count)


def _row(value: Json, length: int | None = None) -> tuple[Json, ...]:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise ManifestError("cuts", "a list" if length is None else f"{length} values", value)
    return tuple(value)


def _dims(value: Json) -> Dims:
    pairs = [_row(pair, 2) for pair in _row(value)]
    good = all(map(_are_counts, pairs))
    in_order = good and all(before < after for before, after in pairwise(pairs))
    require(in_order, "cuts", "dimensions and their sizes", value)
    return tuple(pairs)


def _are_counts(values: Iterable[Json]) -> bool:
    return all(map(is_count, values))


def _run(value: Json, num_dims: int, ranks: Collection[int]) -> Run:
    rank, stride, num_ranks, *lists = _row(value, 6)
    offsets, steps, sizes = (_row(one, num_dims) for one in lists)
    numbers = (rank, stride, num_ranks, *offsets, *sizes)
    require(_are_counts(numbers), "cuts", "whole numbers", value)
    require(all(type(step) is int for step in steps), "cuts", "whole numbers", value)
    # Their number first: it may be any.
    few = stride >= 1 and 1 <= num_ranks <= len(ranks)
    require(few, "cuts", f"at most {len(ranks)} ranks", value)
    theirs = range(rank, rank + stride * num_ranks, stride)
    require(all(one in ranks for one in theirs), "cuts", "ranks that have a record", value)
    return Run(rank, stride, num_ranks, offsets, steps, sizes)
