"""Which files of a checkpoint a rank has to read.

All files of replicated state, the rank's own files, and every file with a shard that overlaps what
the rank holds now. So if N ranks restore what N ranks wrote, each rank reads its own shards only.
"""

from __future__ import annotations

from collections.abc import Mapping

from checkfreq.state.capture import POSITIONS
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.store.boxes import Box
from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.store.parts import file_of, tied_names
from checkfreq.types import Json, Role


def needed_files(chk: CFCheckpoint, manifest: Manifest, role: Role) -> set[str]:
    """Names of the files from which this rank's live state can be restored."""
    files = {file.name: file for file in manifest.files}
    needed = set(files)
    is_new, first = role.rank not in manifest.ranks, min(manifest.ranks, default=0)
    names = {name for own in manifest.ranks.values() for name in own}.union(manifest.objects)
    # Not the positions: an iterator may be called "shards", which would look like a field below.
    for name in names - {POSITIONS}:
        live = _Live(chk, manifest, name)
        for rank, own in manifest.ranks.items():
            file = files.get(file_of(name, rank))
            if file is None:
                continue
            shards = own.get(name, {}).get("shards", {})
            # Whole tensors count if the rank is this one. A new rank takes the first one's, such as
            # buffers, but no object that the first rank had for itself.
            counts = rank == (first if is_new else role.rank)
            counts &= any(entry.name not in shards for entry in file.tensors)
            counts &= not is_new or "kind" not in own.get(name, {})
            if not counts and not live.overlaps(file, shards):
                needed.discard(file.name)
    return needed


class _Live:
    """What the live object called ``name`` holds. Kept, since every rank's file asks for it."""

    def __init__(self, chk: CFCheckpoint, manifest: Manifest, name: str) -> None:
        adapter = chk.adapters.get(name)
        self._holdings = None if adapter is None else adapter.holdings()
        self._tied = tied_names(manifest.objects.get(name, {}), name, manifest.ranks.values())
        self._boxes: dict[str, list[Box]] = {}

    def overlaps(self, file: FileEntry, shards: Mapping[str, Json]) -> bool:
        """Whether a file has a shard that overlaps what the live object holds."""
        for entry in file.tensors:
            if entry.name in shards:
                shape, offsets = map(tuple, shards[entry.name])
                shard = Box(offsets, tuple(entry.shape))
                if any(_overlap(shard, box) for box in self._boxes_of(entry.name, shape)):
                    return True
        return False

    def _boxes_of(self, key: str, shape: tuple[int, ...]) -> list[Box]:
        if self._holdings is None:
            return []
        if key not in self._boxes:
            names = (key, *self._tied.get(key, ()))
            self._boxes[key] = [box for name in names for box in self._holdings(name, shape)]
        return self._boxes[key]


def _overlap(shard: Box, live: Box) -> bool:
    """True also for a different number of dimensions: it is read, so that this is reported."""
    return len(live.sizes) != len(shard.sizes) or live.overlap(shard) is not None
