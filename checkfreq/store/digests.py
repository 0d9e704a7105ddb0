"""How the bytes of a tensor are cut into pieces, each with a digest of its own. Pure.

A reader that needs a part of a tensor reads, and verifies, only the pieces that the part meets;
and several threads digest one tensor. Writers choose the size of a tensor's pieces here; readers
take it from the tensor's entry. Digests are xxh3_64; those of the pieces stand one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, isqrt
from typing import Protocol

from xxhash import xxh3_64, xxh3_64_hexdigest

from checkfreq.types import PAGE_BYTES

#: Hexadecimal digits of one digest.
DIGEST_DIGITS = 16
#: Most bytes of a piece: what stays in a processor's cache.
MOST_BYTES = 1 << 20
#: A shard has at least so many pieces, unless they would be smaller than a page: its rows may be
#: divided among twice, four times or eight times as many ranks, none of which reads another's.
_SHARD_PIECES = 8
#: To divide a shard evenly, pieces may be so short, in bytes, or so many times a page.
_LEAST_EVEN_BYTES, _MOST_EVEN_PAGES = 32 << 10, 4


class Cut(Protocol):
    """A tensor's bytes and how they are cut: `piece_bytes` is 0 if there is one piece."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def piece_bytes(self) -> int: ...


class Digested(Cut, Protocol):
    """The same with the digests."""

    @property
    def digest(self) -> str: ...


def piece_bytes_of(num_bytes: int) -> int:
    """Size of the pieces of a tensor of ``num_bytes``; 0 for one piece."""
    return MOST_BYTES if num_bytes > MOST_BYTES else 0


def piece_bytes_of_shard(shape: Sequence[int], num_bytes: int) -> int:
    """The same for a shard: pieces are whole rows, or whole rows of what is in a longer row."""
    if not shape or num_bytes <= PAGE_BYTES:
        return 0
    row_bytes = num_bytes // shape[0]
    if shape[0] == 1 or row_bytes > MOST_BYTES:
        return piece_bytes_of_shard(shape[1:], row_bytes)
    found = _rows_of_piece(shape[0], row_bytes) * row_bytes
    return found if found < num_bytes else 0


def _rows_of_piece(rows: int, row_bytes: int) -> int:
    least = min(-(-PAGE_BYTES // row_bytes), rows)
    usual = max(min(rows // _SHARD_PIECES, MOST_BYTES // row_bytes), least)
    fewest = max(least, min(usual, -(-_LEAST_EVEN_BYTES // row_bytes)))
    # Of short rows, a page may be no share of the shard: then some pages.
    most = usual if usual > least or least == 1 else min(_MOST_EVEN_PAGES * least, rows)
    shares = [(gcd(rows // n, _SHARD_PIECES), n) for n in _divisors(rows) if fewest <= n <= most]
    return max((found for found in shares if found[0] > 1), default=(1, usual))[1]


def _divisors(number: int) -> Iterator[int]:
    for small in range(1, isqrt(number) + 1):
        if number % small == 0:
            yield from {small, number // small}


def spans(tensor: Cut) -> Iterator[tuple[int, int]]:
    """Begin and end of each piece within the tensor; one, perhaps empty, if it is not cut."""
    step = tensor.piece_bytes or max(tensor.num_bytes, 1)
    for begin in range(0, max(tensor.num_bytes, 1), step):
        yield begin, min(begin + step, tensor.num_bytes)


def num_pieces(tensor: Cut) -> int:
    """How many there are, and digests."""
    return -(-tensor.num_bytes // tensor.piece_bytes) if tensor.piece_bytes else 1


def pieces_of(tensor: Digested) -> Iterator[tuple[int, int, str]]:
    """Begin, end and digest of each piece within the tensor."""
    if not tensor.piece_bytes:  # most of very many small ones
        yield 0, tensor.num_bytes, tensor.digest
        return
    for number, (begin, end) in enumerate(spans(tensor)):
        yield begin, end, tensor.digest[number * DIGEST_DIGITS : (number + 1) * DIGEST_DIGITS]


def digest_pieces(data: memoryview, tensor: Cut) -> str:
    """The digests of all pieces of a tensor whose bytes are ``data``."""
    return "".join(xxh3_64_hexdigest(data[begin:end]) for begin, end in spans(tensor))


class PieceDigests:
    """`digest_pieces` of bytes that come a chunk at a time."""

    def __init__(self, tensor: Cut) -> None:
        self._piece_bytes = tensor.piece_bytes or max(tensor.num_bytes, 1)
        self._left = self._piece_bytes
        self._state = xxh3_64()
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        """The next bytes."""
        while len(data):
            if not self._left:
                self._done.append(self._state.hexdigest())
                self._state, self._left = xxh3_64(), self._piece_bytes
            part, data = data[: self._left], data[self._left :]
            self._state.update(part)
            self._left -= len(part)

    def text(self) -> str:
        """The digests of all pieces of what has come."""
        return "".join([*self._done, self._state.hexdigest()])
