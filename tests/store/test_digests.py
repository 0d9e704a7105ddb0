"""How tensors are cut into pieces with a digest each."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from checkfreq.store.digests import (
    MOST_BYTES,
    PieceDigests,
    digest_pieces,
    piece_bytes_of,
    piece_bytes_of_shard,
    pieces_of,
)
from checkfreq.types import PAGE_BYTES

MIB = 1 << 20


@dataclass(frozen=True)
class Cut:
    """A tensor's bytes, and how they are cut."""

    num_bytes: int
    piece_bytes: int
    digest: str = ""


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    num_bytes = draw(st.integers(0, 200))
    return Cut(num_bytes, draw(st.integers(0, max(num_bytes - 1, 0))))


@given(cuts(), st.lists(st.integers(0, 90)))
def test_each_piece_has_its_bytes_digest_however_they_come(cut: Cut, chunks: list[int]) -> None:
    data = memoryview(bytes(range(cut.num_bytes)))
    digest = digest_pieces(data, cut)
    for begin, end, found in pieces_of(Cut(cut.num_bytes, cut.piece_bytes, digest)):
        assert found == xxh3_64_hexdigest(data[begin:end])
    in_chunks, at = PieceDigests(cut), 0
    for size in [*chunks, cut.num_bytes]:
        in_chunks.update(data[at : at + size])
        at += size
    assert in_chunks.text() == digest


def test_a_tensor_up_to_a_mebibyte_is_one_piece_and_a_larger_one_is_cut_every_mebibyte() -> None:
    assert MOST_BYTES == MIB
    assert piece_bytes_of(0) == piece_bytes_of(MIB) == 0
    assert piece_bytes_of(MIB + 1) == piece_bytes_of(1 << 40) == MIB


@pytest.mark.parametrize(
    ("shape", "item", "rows"),
    [
        ([], 4, None),  # a scalar
        ([1, 1 << 20], 4, 1 / 8),  # one row
        ([8, 1024], 4, 1),
        ([64, 96], 4, 16),  # more than a page: eleven rows divide nothing
        ([1024, 1024], 4, 128),  # 4 MiB in eight pieces
        ([8 * 1009, 1024], 4, 256),  # a prime: not evenly
        ([6, 1 << 20], 4, 1 / 8),  # rows of four mebibytes
    ],
)
def test_a_shard_is_cut_at_whole_rows(shape: list[int], item: int, rows: float | None) -> None:
    num_bytes = prod(shape) * item
    row_bytes = num_bytes // shape[0] if shape and shape[0] else 0
    assert piece_bytes_of_shard(shape, num_bytes) == (rows or 0) * row_bytes


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 30))
def test_there_are_few_pieces_of_any_shard(rows: int, row_bytes: int) -> None:
    num_bytes = rows * row_bytes
    pieces = piece_bytes_of_shard([rows, row_bytes], num_bytes)
    count = -(-num_bytes // pieces) if pieces else 1
    assert count <= max(64, num_bytes // (MIB // 32))
    assert pieces == 0 or pieces >= PAGE_BYTES
