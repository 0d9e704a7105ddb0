"""Packs many small tensors into one transfer, and divides large strided ones into pieces.

Arithmetic and views only, no device. Copies must move bits, not numbers: half-precision tensors are
viewed as integers, since a copy kernel may compute in float32, which changes the bits of NaNs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkfreq.snapshot.engine import Copy

#: A run begins as far behind a multiple of this as it does in the slot, so every dtype is aligned.
_ALIGNMENT = 64

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Copy kernels for these move the bits unchanged, so they need no integer view.
_PLAIN_DTYPES = {
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float32, torch.float64),
}


@dataclass(frozen=True, slots=True)
class Run:
    """``num_bytes`` that are adjacent in the slot as well as in the packed buffer."""

    slot_offset: int
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Where copies lie in a packed buffer: ``copies[i]`` at ``begins[i]``."""

    copies: tuple[Copy, ...]
    begins: tuple[int, ...]
    runs: tuple[Run, ...]
    num_bytes: int

    @classmethod
    def of(cls, copies: Sequence[Copy]) -> Packing:
        """Pack in the order of the slot, so that neighbours there stay neighbours.

        Copies must not be empty.
        """
        ordered = sorted(copies, key=lambda copy: copy.offset)
        begins: list[int] = []
        runs: list[Run] = []
        slot_end = end = slot_begin = begin = 0
        for copy in ordered:
            if copy.offset != slot_end or not begins:
                if end > begin:
                    runs.append(Run(slot_begin, begin, end - begin))
                slot_begin, begin = copy.offset, _next_begin(end, copy.offset)
                end = begin
            begins.append(end)
            end += copy.num_bytes
            slot_end = copy.offset + copy.num_bytes
        if end > begin:
            runs.append(Run(slot_begin, begin, end - begin))
        return cls(tuple(ordered), tuple(begins), tuple(runs), end)


def _next_begin(end: int, slot_offset: int) -> int:
    return -(-end // _ALIGNMENT) * _ALIGNMENT + slot_offset % _ALIGNMENT


def target_and_source(copy: Copy, base: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    """The views of one copy into ``base`` (`[N] uint8`) at ``begin``, as (target, source).

    A contiguous source is viewed as flat bits; any other keeps its shape, and its target is
    row-major.
    """
    source, room = copy.source, base[begin : begin + copy.num_bytes]
    if is_plain(source):
        bits = as_bits(source if source.dim() == 1 else source.view(-1))
        return room.view(bits.dtype), bits
    target = room.view(source.dtype).view(source.shape)
    if source.is_conj() or source.is_neg():
        return target, source
    return as_bits(target), as_bits(source)


def is_plain(tensor: Tensor) -> bool:
    """Whether the storage holds exactly the tensor's bytes in row-major order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def as_bits(tensor: Tensor) -> Tensor:
    """A view of a dtype whose copy kernels move bits; the tensor itself where it is of one."""
    if tensor.dtype in _PLAIN_DTYPES or tensor.element_size() not in _BITS:
        return tensor
    return tensor.view(_BITS[tensor.element_size()])


def grouped(
    pairs: Sequence[tuple[Tensor, Tensor]],
) -> tuple[list[tuple[list[Tensor], list[Tensor]]], list[tuple[Tensor, Tensor]]]:
    """Pairs that one multi-tensor copy can take, by dtype, and the pairs to be copied singly."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    others = []
    for target, source in pairs:
        if source.dtype in _PLAIN_DTYPES and source.is_contiguous():
            targets, sources = groups.setdefault(source.dtype, ([], []))
            targets.append(target)
            sources.append(source)
        else:
            others.append((target, source))
    return list(groups.values()), others


def row_major_pieces(tensor: Tensor, max_bytes: int) -> Iterator[tuple[int, Tensor]]:
    """Divide a tensor into (offset in bytes, view) pieces, consecutive in row-major order.

    No piece is larger than ``max_bytes``, or one element if that is larger.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes <= max_bytes:
        yield 0, tensor
        return
    row_bytes = num_bytes // tensor.shape[0]
    num_rows = max_bytes // row_bytes
    if num_rows:
        for row in range(0, tensor.shape[0], num_rows):
            yield row * row_bytes, tensor[row : row + num_rows]
        return
    for row in range(tensor.shape[0]):
        for offset, piece in row_major_pieces(tensor[row], max_bytes):
            yield row * row_bytes + offset, piece


def cut(
    target: Tensor, source: Tensor, *, at: int, piece_bytes: int
) -> list[tuple[Tensor, Tensor]]:
    """Divide a flat copy to the offset ``at`` of a slot at the multiples of ``piece_bytes``.

    ``target`` and ``source`` are `[N]` of one dtype. No element crosses a border: it lies at a
    multiple of its size, which divides the page (layout.py), and borders are at pages.
    """
    size = target.element_size()
    end = at + target.numel() * size
    if not _crosses(at, end, piece_bytes):  # almost all of them: made while step() waits
        return [(target, source)]
    assert target.dim() == source.dim() == 1
    assert at % size == piece_bytes % size == 0
    pairs, begin = [], at
    while begin < end:
        border = min(end, (begin // piece_bytes + 1) * piece_bytes)
        part = slice((begin - at) // size, (border - at) // size)
        pairs.append((target[part], source[part]))
        begin = border
    return pairs


def chunked(
    packing: Packing, buffer: Tensor, base: Tensor, chunk_bytes: int, *, piece_bytes: int
) -> list[tuple[Tensor, Tensor]]:
    """Copies of a packed ``buffer`` to its places in a slot (``base``), of ``chunk_bytes`` at most.

    They are cut at the multiples of ``piece_bytes``.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for run in packing.runs:
        for done in range(0, run.num_bytes, chunk_bytes):
            size = min(chunk_bytes, run.num_bytes - done)
            at, begin = run.slot_offset + done, run.begin + done
            chunk = base[at : at + size], buffer[begin : begin + size]
            pairs += cut(*chunk, at=at, piece_bytes=piece_bytes)
    return pairs


def pieces_of(copy: Copy, max_bytes: int) -> Iterator[Copy]:
    """Divide the copy of a tensor as ``row_major_pieces`` does."""
    for offset, piece in row_major_pieces(copy.source, max_bytes):
        num_bytes = piece.numel() * piece.element_size()
        yield Copy(copy.name, piece, copy.offset + offset, num_bytes, copy.settled)


def uncrossing_pieces(copy: Copy, max_bytes: int, *, piece_bytes: int) -> Iterator[Copy]:
    """``pieces_of``, divided further until none crosses a multiple of ``piece_bytes``."""
    for piece in pieces_of(copy, max_bytes):
        if _crosses(piece.offset, piece.offset + piece.num_bytes, piece_bytes):
            yield from uncrossing_pieces(piece, piece.num_bytes // 2, piece_bytes=piece_bytes)
        else:
            yield piece


def _crosses(begin: int, end: int, piece_bytes: int) -> bool:
    """Whether bytes of a slot lie on both sides of a multiple of ``piece_bytes``."""
    return begin // piece_bytes != (end - 1) // piece_bytes
