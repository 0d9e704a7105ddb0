"""How a payload file is cut into pieces: runs of whole tensors, each an object of its own. Pure.

Tensors from `LEAST_BYTES` up are pieces by themselves; smaller neighbours are put together. So a
large tensor that never changes (a frozen weight) is uploaded once, whatever lies beside it. Where
the checkpoint before is known, its pieces are kept if nothing in them has changed, and what is
new is kept apart from small tensors that are not, from `APART_BYTES` of these up. Whether a tensor
has changed is told by the digests in the two manifests, without reading either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from checkfreq.mirror.layout import Blob
from checkfreq.store.manifest import FileEntry

#: A piece has at least this many bytes, unless the file or a run of small tensors is shorter, and
#: less than twice as many, unless a single tensor has more.
LEAST_BYTES = 8 << 20
#: Unchanged small tensors in a row, of this many bytes together, are no part of a changed piece.
APART_BYTES = 1 << 20


class Unit(NamedTuple):
    """What is never cut: a file's header, or a tensor; ``digest`` is as in the manifest."""

    offset: int
    num_bytes: int
    digest: str
    piece_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive units of a file. ``blob``: the object with their bytes, if it is known."""

    units: tuple[Unit, ...]
    blob: Blob | None = None

    @property
    def offset(self) -> int:
        """Where it begins in the file."""
        return self.units[0].offset

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return sum(unit.num_bytes for unit in self.units)


def units_of(file: FileEntry) -> tuple[Unit, ...]:
    """The header and the tensors of a file, in order, without empty tensors."""
    header = Unit(0, file.header_bytes, file.header_digest)
    tensors = (
        Unit(t.offset, t.num_bytes, t.digest, t.piece_bytes)
        for t in file.in_file_order()
        if t.num_bytes
    )
    return (header, *tensors)


def cut(file: FileEntry, *, before: Sequence[Run] = ()) -> list[Run]:
    """The pieces of ``file``, in order; those of ``before`` that have not changed keep their blob.

    ``before``: the same file in the checkpoint that was uploaded last.
    """
    units = units_of(file)
    there = set(units)
    kept = {run.offset: run for run in before if run.blob and there.issuperset(run.units)}
    known = {unit for run in before for unit in run.units}
    runs: list[Run] = []
    gap: list[Unit] = []
    end = 0
    for unit in units:
        if unit.offset < end:
            continue
        if unit.offset not in kept:
            gap.append(unit)
            continue
        runs += [*_cut_gap(gap, known), kept[unit.offset]]
        gap, end = [], unit.offset + kept[unit.offset].num_bytes
    return runs + list(_cut_gap(gap, known))


def runs_of(file: FileEntry, pieces: Sequence[Blob]) -> list[Run]:
    """The runs that ``pieces`` of a file hold; [] if they do not begin and end at units."""
    runs: list[Run] = []
    units = list(reversed(units_of(file)))
    for piece in pieces:
        taken, left = [], piece.num_bytes
        while units and left >= units[-1].num_bytes:
            left -= units[-1].num_bytes
            taken.append(units.pop())
        if left or not taken:
            return []
        runs.append(Run(tuple(taken), piece))
    return [] if units else runs


def _cut_gap(units: Sequence[Unit], known: set[Unit]) -> Iterator[Run]:
    for part in _apart(units, known):
        yield from _by_size(part)


def _apart(units: Iterable[Unit], known: set[Unit]) -> list[list[Unit]]:
    """Parts that are changed or not, in turn; short unchanged ones belong to their neighbours."""
    parts: list[tuple[bool, list[Unit]]] = []
    for unit in units:
        is_known = unit in known
        if not parts or parts[-1][0] is not is_known:
            parts.append((is_known, []))
        parts[-1][1].append(unit)
    merged: list[tuple[bool, list[Unit]]] = []
    for is_known, part in parts:
        stays = is_known and sum(unit.num_bytes for unit in part) >= APART_BYTES
        if merged and merged[-1][0] is stays:
            merged[-1][1].extend(part)
        else:
            merged.append((stays, part))
    return [part for _, part in merged]


def _by_size(units: Iterable[Unit]) -> Iterator[Run]:
    run: list[Unit] = []
    num_bytes = 0
    for unit in units:
        is_full = num_bytes >= LEAST_BYTES or unit.num_bytes >= LEAST_BYTES
        if run and is_full:
            yield Run(tuple(run))
            run, num_bytes = [], 0
        run.append(unit)
        num_bytes += unit.num_bytes
    if run:
        yield Run(tuple(run))
