"""Tensors of a loaded checkpoint: each in one piece, or in boxes from the files of many ranks.

What overlaps with what is computed by torch.distributed.checkpoint's planner, as for its own
checkpoints; a tensor that is needed whole, or a box that lies in one piece, needs no planner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from checkfreq.state.dtensors import cut_of, is_dtensor, local_of
from checkfreq.state.tensors import DTYPES, copy_bits
from checkfreq.store.boxes import Box


class TensorRecord(Protocol):
    """A tensor of a file: ``TensorSpec`` and the manifest's entries both are one."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def offset(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class Piece(NamedTuple):
    """A box of a tensor in a file; ``data`` are the file's bytes, None if it was not read."""

    box: Box
    record: TensorRecord
    data: Tensor | None

    def view(self) -> Tensor:
        """The tensor as it lies in the buffer."""
        record = self.record
        assert self.data is not None
        data = self.data[record.offset : record.offset + record.num_bytes]
        return data.view(DTYPES[record.dtype]).view(tuple(record.shape))


@dataclass(slots=True)
class SavedTensor:
    """A tensor as it was, wherever its parts are now."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece]

    def lacks(self, box: Box) -> list[Box]:
        """What of ``box`` was not read, or is in no file."""
        return box.without(piece.box for piece in self.pieces if piece.data is not None)

    @property
    def is_in_one_piece(self) -> bool:
        """Whether all of it lies in one file."""
        return len(self.pieces) == 1 and self.pieces[0].box.sizes == self.shape

    def view(self) -> Tensor:
        """All of it, for reading: where it lies if it is in one piece, else put together."""
        if self.is_in_one_piece:
            return self.pieces[0].view()
        whole = torch.empty(self.shape, dtype=DTYPES[self.dtype], device="cpu")
        self.copy_to(whole)
        return whole

    def copy_to(self, target: Tensor) -> None:
        """Fill a live tensor of the same shape and dtype: of a DTensor what it has here."""
        local, box = held(target)
        for part, source in self._sources(box):
            copy_bits(_part(local, part), source)

    def _sources(self, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """Parts of ``box``, by their place in it, and where their values are."""
        if not box.num_elements:
            return
        pieces = [piece for piece in self.pieces if piece.data is not None]
        holder = next((p for p in pieces if p.box.overlap(box) == box), None)
        if holder is not None or not box.sizes:
            piece = holder or pieces[0]
            yield Box.whole(box.sizes), _part(piece.view(), box.within(piece.box))
        elif box.is_whole(self.shape):
            yield from ((piece.box, piece.view()) for piece in pieces)
        else:
            yield from self._planned(box, pieces)

    def _planned(self, box: Box, pieces: list[Piece]) -> Iterator[tuple[Box, Tensor]]:
        from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        saved = TensorStorageMetadata(
            TensorProperties(dtype=DTYPES[self.dtype]),
            torch.Size(self.shape),
            [_chunk(piece.box) for piece in pieces],
        )
        for item in create_read_items_for_chunk_list(self.name, saved, [_chunk(box)]):
            lengths = tuple(item.lengths)
            assert item.storage_index.index is not None
            source = pieces[item.storage_index.index].view()
            there = Box(tuple(item.storage_offsets), lengths)
            yield Box(tuple(item.dest_offsets), lengths), _part(source, there)


def held(live: Tensor) -> tuple[Tensor, Box]:
    """The local tensor behind a live one, and which box of the whole it is."""
    if is_dtensor(live):
        return local_of(live), cut_of(live, "a live tensor").box
    return live, Box.whole(live.shape)


def _chunk(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _part(tensor: Tensor, box: Box) -> Tensor:
    if box.is_whole(tensor.shape):
        return tensor
    for dim, (begin, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor
