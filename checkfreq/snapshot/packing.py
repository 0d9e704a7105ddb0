"""Packs many small tensors into few transfers, and divides large strided ones into pieces.

Arithmetic and views only, no device. Copies must move bits, not numbers: half-precision tensors are
viewed as integers, since a copy kernel may compute in float32, which changes the bits of NaNs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from checkfreq.snapshot.engine import Copy

#: A run begins as far behind a multiple of this as it does in the slot, so every dtype is aligned.
ALIGNMENT = 16

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
    """Where copies lie in a packed buffer: the one with number ``numbers[i]`` at ``begins[i]``."""

    numbers: tuple[int, ...]
    begins: tuple[int, ...]
    runs: tuple[Run, ...]
    num_bytes: int

    @classmethod
    def of(cls, copies: Sequence[Copy], numbers: Iterable[int] | None = None) -> Packing:
        """Pack in the order of the slot, so that neighbours there stay neighbours.

        ``numbers``: which of the ``copies``; None for all. They must not be empty.
        """
        chosen = range(len(copies)) if numbers is None else numbers
        ordered = sorted(chosen, key=lambda number: copies[number].offset)
        begins: list[int] = []
        runs: list[Run] = []
        slot_end = end = slot_begin = begin = 0
        for number in ordered:
            copy = copies[number]
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

    @classmethod
    def rounds(cls, copies: Sequence[Copy], capacity: int) -> list[Packing]:
        """Pack into a buffer of ``capacity`` bytes: in one round if all fit, volatile ones first
        otherwise. Each copy must fit, whichever multiple of ALIGNMENT it begins behind."""
        whole = cls.of(copies)
        if whole.num_bytes <= capacity:
            return [whole]
        rounds: list[list[int]] = []
        slot_end, left = -1, 0
        for number in sorted(whole.numbers, key=lambda number: copies[number].settled):
            copy = copies[number]
            needed = copy.num_bytes + (2 * ALIGNMENT if copy.offset != slot_end else 0)
            if needed > left:
                rounds.append([])
                needed, left = copy.num_bytes + 2 * ALIGNMENT, capacity
            rounds[-1].append(number)
            left -= needed
            slot_end = copy.offset + copy.num_bytes
        return [cls.of(copies, numbers) for numbers in rounds]


def _next_begin(end: int, slot_offset: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT + slot_offset % ALIGNMENT


@dataclass(frozen=True, slots=True)
class Group:
    """Copies that one call can take: the numbers of the copies, and where they go in a buffer.

    ``is_alike``: sources and targets are of one dtype and dense, with the same strides, so that
    a multi-tensor copy moves their bits. ``is_flat`` and ``bits`` say how the sources are viewed.
    """

    is_alike: bool
    is_flat: bool
    bits: torch.dtype | None
    numbers: list[int]
    targets: list[Tensor]

    def sources(self, copies: Sequence[Copy]) -> list[Tensor]:
        """The views that are copied to ``targets``."""
        found = [copies[number].source for number in self.numbers]  # made while step() waits
        if self.is_flat:
            found = [source.view(-1) for source in found]
        return found if self.bits is None else [source.view(self.bits) for source in found]


@dataclass(frozen=True, slots=True)
class Round:
    """Copies that are in the buffer at the same time, and their places there."""

    memory: Tensor
    runs: tuple[Run, ...]
    volatile: tuple[Group, ...]
    settled: tuple[Group, ...]


class Packed:
    """The rounds in which copies go through ``memory``, `[N] uint8`; none holds a source.

    They are made once for all snapshots whose copies go to the same places and have sources of the
    same form: it takes microseconds for each tensor.
    """

    def __init__(self, copies: Sequence[Copy], memory: Tensor) -> None:
        self.memory = memory
        self._places = _places(copies)
        self._forms = _forms(copies)
        packings = Packing.rounds(copies, memory.numel())
        self.rounds = tuple([_round(copies, packing, memory) for packing in packings])

    def by_stream(self) -> tuple[tuple[Round, ...], tuple[Round, ...]]:
        """The rounds up to the last with a volatile tensor, at least one; and those after it."""
        last = max((n for n, one in enumerate(self.rounds) if one.volatile), default=0)
        return self.rounds[: last + 1], self.rounds[last + 1 :]

    def fits(self, copies: Sequence[Copy]) -> bool:
        """Whether the rounds are those of ``copies``."""
        return _places(copies) == self._places and _forms(copies) == self._forms


def _places(copies: Sequence[Copy]) -> list[tuple[int, int, bool, bool]]:
    return [copy[2:] for copy in copies]


_DTYPE = attrgetter("dtype")


def _forms(copies: Sequence[Copy]) -> list[list[object]]:
    """What the views of the sources depend on."""
    sources = [copy.source for copy in copies]
    ask = (_DTYPE, Tensor.size, Tensor.stride, Tensor.is_conj, Tensor.is_neg)
    return [[*map(one, sources)] for one in ask]


def _round(copies: Sequence[Copy], packing: Packing, memory: Tensor) -> Round:
    places = [*zip(packing.numbers, packing.begins, strict=True)]
    volatile = [place for place in places if not copies[place[0]].settled]
    settled = [place for place in places if copies[place[0]].settled]
    groups = [tuple(_groups(copies, some, memory)) for some in (volatile, settled)]
    return Round(memory, packing.runs, *groups)


def _groups(
    copies: Sequence[Copy], places: Iterable[tuple[int, int]], memory: Tensor
) -> Iterable[Group]:
    found: dict[object, Group] = {}
    for number, begin in places:
        source = copies[number].source
        target, is_flat, bits = _target(copies[number], memory, begin)
        is_alike = is_plain(source) and target.dtype in _PLAIN_DTYPES
        key = is_alike, is_flat, bits, target.dtype
        group = found.setdefault(key, Group(*key[:3], [], []))
        group.numbers.append(number)
        group.targets.append(target)
    return found.values()


def _target(copy: Copy, memory: Tensor, begin: int) -> tuple[Tensor, bool, torch.dtype | None]:
    """A view of a buffer, whether the source is viewed flat, and as what if not as it is.

    The target has the shape of its source, but where a contiguous source has strides of its own.
    """
    source = copy.source
    target = memory[begin : begin + copy.num_bytes].view(source.dtype).view(source.shape)
    is_flat = is_plain(source) and target.stride() != source.stride()
    if is_flat:
        target = target.view(-1)
    if source.is_conj() or source.is_neg():
        return target, is_flat, None
    bits = as_bits(target)
    return bits, is_flat, None if bits is target else bits.dtype


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
    packed: Round, base: Tensor, chunk_bytes: int, *, piece_bytes: int
) -> list[tuple[Tensor, Tensor]]:
    """Copies of what is packed to its places in a slot (``base``), of ``chunk_bytes`` at most.

    They are cut at the multiples of ``piece_bytes``.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for run in packed.runs:
        for done in range(0, run.num_bytes, chunk_bytes):
            size = min(chunk_bytes, run.num_bytes - done)
            at, begin = run.slot_offset + done, run.begin + done
            chunk = base[at : at + size], packed.memory[begin : begin + size]
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
