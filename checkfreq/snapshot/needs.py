"""Which files of a checkpoint a rank has to read: all of what is replicated, its own, and shards
that overlap what it holds. So N ranks restoring what N ranks wrote read each byte once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from checkfreq.checkpoint import CFCheckpoint
from checkfreq.snapshot.adapters.base import Holdings
from checkfreq.snapshot.boxes import Box
from checkfreq.snapshot.layout import file_name
from checkfreq.snapshot.parts import stem_of
from checkfreq.snapshot.pieces import TensorRecord
from checkfreq.types import Json, Role


class RecordedFile(Protocol):
    """A file in a manifest."""

    @property
    def name(self) -> str: ...
    @property
    def tensors(self) -> Sequence[TensorRecord]: ...


class Recorded(Protocol):
    """What is asked of a manifest."""

    @property
    def files(self) -> Collection[RecordedFile]: ...
    @property
    def objects(self) -> Mapping[str, Json]: ...
    @property
    def ranks(self) -> Mapping[int, Mapping[str, Json]]: ...


def needed_files(chk: CFCheckpoint, manifest: Recorded, role: Role) -> set[str]:
    """Names of the files from which this rank's live state can be restored."""
    files = {file.name: file for file in manifest.files}
    needed = set(files)
    names = {name for own in manifest.ranks.values() for name in own}.union(manifest.objects)
    for name in names:
        holdings = chk.adapters[name].holdings() if name in chk.adapters else _nothing
        names_of = _names_of(manifest, name)
        for rank, own in manifest.ranks.items():
            file = files.get(file_name(stem_of(name, rank)))
            if file is None:
                continue
            boxes = own.get(name, {}).get("shards", {})
            is_own = rank == role.rank and any(r.name not in boxes for r in file.tensors)
            if not is_own and not _overlaps(file, boxes, holdings, names_of):
                needed.discard(file.name)
    return needed


def _nothing(key: str, shape: tuple[int, ...]) -> Sequence[Box]:
    return ()


def _names_of(manifest: Recorded, name: str) -> dict[str, list[str]]:
    """By key, the tied names."""
    owns = (own.get(name, {}) for own in manifest.ranks.values())
    found: dict[str, list[str]] = {}
    for json in (manifest.objects.get(name, {}), *owns):
        for tied, key in json.get("aliases", {}).items():
            found.setdefault(key, []).append(tied)
    return found


def _overlaps(
    file: RecordedFile,
    boxes: Mapping[str, Json],
    holdings: Holdings,
    names_of: Mapping[str, Sequence[str]],
) -> bool:
    for record in file.tensors:
        if record.name not in boxes:
            continue
        shape, offsets = (tuple(numbers) for numbers in boxes[record.name])
        box = Box(offsets, tuple(record.shape))
        for name in (record.name, *names_of.get(record.name, ())):
            if any(_meets(held, box) for held in holdings(name, shape)):
                return True
    return False


def _meets(held: Box, box: Box) -> bool:
    """Another number of dimensions is a mismatch, to be reported with what was read."""
    return len(held.sizes) != len(box.sizes) or held.overlap(box) is not None
