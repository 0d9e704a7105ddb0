"""Comparing a payload file with its manifest entry. Reads only; any thread."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Protocol

import xxhash

from checkfreq.errors import CorruptCheckpointError
from checkfreq.store.digests import pieces_of
from checkfreq.store.fileops import ReadFile
from checkfreq.store.manifest import FileEntry

_READ_CHUNK_BYTES = 4 << 20
#: A safetensors file begins with the length of its header; its library accepts no longer header.
_LENGTH_BYTES, _LARGEST_HEADER_BYTES = 8, 100_000_000


class SizedFile(Protocol):
    """A file that a record names, with its length."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""

    @property
    def num_bytes(self) -> int:
        """Its length in bytes."""


def expect_size(path: str, entry: SizedFile, got: int) -> None:
    """CorruptCheckpointError unless ``got`` is the size in the entry."""
    if got != entry.num_bytes:
        raise CorruptCheckpointError(path, check="size in bytes", expected=entry.num_bytes, got=got)


def verify_digests(path: str, entry: FileEntry, file: ReadFile) -> None:
    """Check every digest of a file, in one pass with one buffer."""
    regions = [("header digest", entry.header_bytes, entry.header_digest)]
    for tensor in entry.in_file_order():
        for begin, end, digest in pieces_of(tensor):
            where = f", bytes {begin} to {end}" if tensor.piece_bytes else ""
            regions.append((f"digest of tensor {tensor.name!r}{where}", end - begin, digest))
    bytes_left = _ByteStream(_chunks(file))
    for check, num_bytes, expected in regions:
        got = bytes_left.digest_next(num_bytes)
        if got != expected:
            raise CorruptCheckpointError(path, check=check, expected=expected, got=got)


def _chunks(file: ReadFile) -> Iterator[memoryview]:
    """The file in order. A piece is valid until the next; the buffer is aligned for direct I/O."""
    buffer = memoryview(mmap.mmap(-1, _READ_CHUNK_BYTES))
    offset = 0
    while count := file.preadinto(buffer, offset):
        yield buffer[:count]
        offset += count


def header_bytes(file: ReadFile) -> int:
    """How many bytes of a file's header have content: neither padding blanks nor zeros."""
    count, end = 0, 0
    for chunk in _chunks(file):
        if not end:
            claimed = int.from_bytes(chunk[:_LENGTH_BYTES], "little")
            end = _LENGTH_BYTES + min(claimed, _LARGEST_HEADER_BYTES)
        part = bytes(chunk[:end])
        count += len(part.translate(None, b" \0"))
        end -= len(part)
        if end <= 0:
            break
    return count


class _ByteStream:
    """Digests of consecutive regions of a file that is read in pieces."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self._piece = memoryview(b"")

    def digest_next(self, num_bytes: int) -> str:
        """Digest of the next ``num_bytes``, or of fewer if the file ends before."""
        state = xxhash.xxh3_64()
        while num_bytes:
            if not len(self._piece):
                self._piece = next(self._pieces, memoryview(b""))
                if not len(self._piece):
                    break
            part, self._piece = self._piece[:num_bytes], self._piece[num_bytes:]
            state.update(part)
            num_bytes -= len(part)
        return str(state.hexdigest())
