"""One tensor of a checkpoint: the chunks of it that files hold, and where they go.

Nothing here reads a file. A live tensor and a saved one make ``Placement``s: which elements of
which chunk belong in which memory. A ``Reader`` fills them. How shards overlap is computed by
torch.distributed.checkpoint's planner, as for its own checkpoints. A tensor that is needed whole,
or a box that lies within one chunk, needs no planner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from checkfreq.state.dtensors import is_dtensor, local_of, shard_of
from checkfreq.state.tensors import DTYPES
from checkfreq.store.boxes import Box
from checkfreq.store.manifest import FileEntry, TensorEntry


class Chunk(NamedTuple):
    """A box of a tensor, which is all of one tensor of a file, row by row."""

    box: Box
    file: FileEntry
    entry: TensorEntry


class Placement(NamedTuple):
    """Elements of a chunk, and the memory that they go to.

    ``part`` is a box within the chunk. ``target`` has its sizes, any strides and any device; no two
    elements of it share memory.
    """

    chunk: Chunk
    part: Box
    target: Tensor


class Reader(Protocol):
    """Reads tensors of one checkpoint."""

    def read(self, placements: Sequence[Placement]) -> None:
        """Fill every target; what is in the targets is undefined if it raises.

        A chunk that several placements need is read once. Raises CorruptCheckpointError for bytes
        that are not what the manifest says; other OSErrors pass through.
        """


@dataclass(slots=True)
class SavedTensor:
    """One tensor of a checkpoint, as it was before ranks divided it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)
    #: Those that it had, if they are recorded and not row-major.
    strides: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return Box.whole(self.shape).num_elements * DTYPES[self.dtype].itemsize

    def has_strides_of(self, live: Tensor) -> bool:
        """Whether a tensor of the same shape has the saved strides."""
        if self.strides is None or not live.numel():
            return live.is_contiguous() or not live.numel()
        both = zip(self.shape, self.strides, live.stride(), strict=True)
        return all(one == other for size, one, other in both if size > 1)

    def missing(self, box: Box) -> list[Box]:
        """The parts of ``box`` that no file holds."""
        return box.without(chunk.box for chunk in self.chunks)

    def placements(self, target: Tensor) -> Iterator[Placement]:
        """What fills a tensor of the same shape and dtype; of a DTensor, the shard held here."""
        local, box = local_part(target)
        local = local.detach()
        for part, chunk, source in self._sources(box):
            yield placed(chunk, source, _part(local, part))

    def _sources(self, box: Box) -> Iterator[tuple[Box, Chunk, Box]]:
        """The parts of ``box`` by their place in it, each with its chunk and its place there."""
        if not box.num_elements:
            return
        holder = next((one for one in self.chunks if one.box.overlap(box) == box), None)
        if holder is not None or not box.sizes:
            chunk = holder or self.chunks[0]
            yield Box.whole(box.sizes), chunk, box.within(chunk.box)
        elif box.is_whole(self.shape):
            yield from ((one.box, one, Box.whole(one.box.sizes)) for one in self.chunks)
        else:
            yield from self._planned(box)

    def _planned(self, box: Box) -> Iterator[tuple[Box, Chunk, Box]]:
        from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        saved = TensorStorageMetadata(
            TensorProperties(dtype=DTYPES[self.dtype]),
            torch.Size(self.shape),
            [_chunk_metadata(chunk.box) for chunk in self.chunks],
        )
        for item in create_read_items_for_chunk_list(self.name, saved, [_chunk_metadata(box)]):
            lengths = tuple(item.lengths)
            assert item.storage_index.index is not None
            chunk = self.chunks[item.storage_index.index]
            there = Box(tuple(item.storage_offsets), lengths)
            yield Box(tuple(item.dest_offsets), lengths), chunk, there


def local_part(live: Tensor) -> tuple[Tensor, Box]:
    """The local tensor behind a live one, and which box of the whole it is."""
    if is_dtensor(live):
        return local_of(live), shard_of(live, "a live tensor").box
    return live, Box.whole(live.shape)


def without_repeats(target: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """An expanded tensor (stride 0) with each element once, and the dimensions that repeat it."""
    repeated = tuple(
        dim
        for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True))
        if stride == 0 and size > 1
    )
    for dim in repeated:
        target = target.narrow(dim, 0, 1)
    return target, repeated


def copy_bits(target: Tensor, source: Tensor) -> None:
    """Copy values into ``target`` in place, also where ``target`` is expanded (stride 0)."""
    target, repeated = without_repeats(target)
    for dim in repeated:
        source = source.narrow(dim, 0, 1)
    target.copy_(source)


def placed(chunk: Chunk, part: Box, target: Tensor) -> Placement:
    """The placement that fills ``target``, which may be expanded (stride 0), from ``part``."""
    target, repeated = without_repeats(target)
    if repeated:
        sizes = (1 if dim in repeated else size for dim, size in enumerate(part.sizes))
        part = Box(part.offsets, tuple(sizes))
    return Placement(chunk, part, target)


def _chunk_metadata(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _part(tensor: Tensor, box: Box) -> Tensor:
    if box.is_whole(tensor.shape):
        return tensor
    for dim, (begin, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor
