"""Reads files of a checkpoint into memory, and verifies every digest on the way.

Several threads read chunks, from a disk with direct I/O, while others digest the tensors whose
chunks have arrived, so that verifying costs hardly any time beside the read. Nothing is returned
unless every byte is what the manifest says. No torch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from checkfreq.errors import CorruptCheckpointError
from checkfreq.store.digests import pieces_of
from checkfreq.store.fileops import ReadFile
from checkfreq.store.manifest import FileEntry
from checkfreq.store.source import CheckpointSource, Piece
from checkfreq.types import round_up_to_page

#: One thread digests faster than a disk delivers; a second one works while it waits for a chunk.
_NUM_DIGEST_THREADS = 2
#: Hexadecimal digits of xxh3_64, with which a manifest lists tensors; pieces have xxh3_128.
_SHORT_DIGEST = 16


def buffer_bytes(files: Iterable[FileEntry]) -> int:
    """Bytes of buffer that ``read_files`` needs: every file rounded up to a page."""
    return sum(round_up_to_page(file.num_bytes) for file in files)


def read_files(
    source: CheckpointSource,
    step: int,
    files: Sequence[FileEntry],
    buffer: memoryview,
    *,
    num_threads: int = 4,
    chunk_bytes: int = 8 << 20,
    on_read: Callable[[int], object] = lambda num_bytes: None,
) -> Mapping[str, memoryview]:
    """Read files of a committed step into ``buffer`` (page aligned, ``buffer_bytes`` long).

    Returns the bytes of each file by name, as views of ``buffer``. ``on_read`` is told by the
    reading threads how many bytes have arrived. Raises CorruptCheckpointError at the first wrong
    size, wrong digest or missing file; other OSErrors pass through.
    """
    found: dict[str, memoryview] = {}
    start = 0
    with (
        ExitStack() as stack,
        ThreadPoolExecutor(num_threads, thread_name_prefix="checkfreq-read") as readers,
        ThreadPoolExecutor(_NUM_DIGEST_THREADS, thread_name_prefix="checkfreq-digest") as checkers,
    ):
        checks: list[Future[None]] = []
        try:
            for entry in files:
                file = source.open_payload(step, entry)
                stack.callback(file.close)
                area = buffer[start : start + round_up_to_page(entry.num_bytes)]
                start += len(area)
                pieces = source.pieces(step, entry)
                chunks = _chunks(entry.num_bytes, pieces, chunk_bytes)
                reads = [
                    readers.submit(_read_chunk, file, area, at, size, on_read)
                    for at, size in chunks
                ]
                data = found[entry.name] = area[: entry.num_bytes]
                arrivals = _Arrivals([at for at, _ in chunks], reads)
                where = source.where(step, entry.name)
                checks += [
                    checkers.submit(_check, where, data, group, arrivals)
                    for group in _groups(_parts(entry, pieces), chunk_bytes)
                ]
            _first_error(checks)
        except BaseException:  # what has not been read yet is not worth waiting for
            readers.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _chunks(num_bytes: int, pieces: Sequence[Piece], chunk_bytes: int) -> list[tuple[int, int]]:
    """Start and size of each read. The last one of a file goes up to the end of its page."""
    if not pieces:
        return [(at, chunk_bytes) for at in range(0, num_bytes, chunk_bytes)]
    return [
        (at, min(chunk_bytes, piece.start + piece.num_bytes - at))
        for piece in pieces
        for at in range(piece.start, piece.start + piece.num_bytes, chunk_bytes)
    ]


def _first_error(checks: Sequence[Future[None]]) -> None:
    # In order, and each check waits for its reads: a failed read is raised here too.
    try:
        for check in checks:
            check.result()
    except BaseException:
        for check in checks:
            check.cancel()
        raise


def _read_chunk(
    file: ReadFile, area: memoryview, start: int, size: int, on_read: Callable[[int], object]
) -> None:
    end = min(start + size, len(area))
    wanted = min(end, file.size) - start
    got = file.preadinto(area[start:end], start)
    if got != wanted:
        raise OSError(f"expected {wanted} bytes at byte {start}, got {got}: the file shrank")
    on_read(got)


class _Part(NamedTuple):  # a tuple, since there may be a million
    """A run of a file's bytes, and the digest that they must have."""

    name: str
    start: int
    num_bytes: int
    digest: str

    @property
    def end(self) -> int:
        return self.start + self.num_bytes

    def digest_in(self, data: memoryview) -> str:
        run = data[self.start : self.end]
        is_long = len(self.digest) > _SHORT_DIGEST
        return xxh3_128_hexdigest(run) if is_long else xxh3_64_hexdigest(run)


def _parts(entry: FileEntry, pieces: Sequence[Piece]) -> list[_Part]:
    """What has a digest, in file order; a piece before the parts of the file that it holds."""
    parts = [_Part(f"piece {n}", p.start, p.num_bytes, p.digest) for n, p in enumerate(pieces)]
    parts.append(_Part("header", 0, entry.header_bytes, entry.header_digest))
    parts += [
        _Part(f"tensor {t.name}", t.offset + begin, end - begin, digest)
        for t in entry.in_file_order()
        for begin, end, digest in pieces_of(t)
    ]
    return sorted(parts, key=lambda part: part.start) if pieces else parts


def _groups(parts: Sequence[_Part], chunk_bytes: int) -> Iterator[list[_Part]]:
    """Neighbouring parts, about a chunk together: fewer and larger tasks for the threads."""
    group: list[_Part] = []
    for part in parts:
        group.append(part)
        if part.end - group[0].start >= chunk_bytes:
            yield group
            group = []
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """The reads of one file: where each starts, ascending, and its future."""

    starts: Sequence[int]
    reads: Sequence[Future[None]]

    def wait_for(self, start: int, end: int) -> None:
        """Return once all bytes of a run are there; raises what kept one of them away."""
        first = max(bisect_right(self.starts, start) - 1, 0)
        for index in range(first, bisect_left(self.starts, end)):
            self.reads[index].result()


def _check(path: str, data: memoryview, parts: Sequence[_Part], arrivals: _Arrivals) -> None:
    for part in parts:
        arrivals.wait_for(part.start, part.end)
        got = part.digest_in(data)
        if got != part.digest:
            raise CorruptCheckpointError(
                path, check=f"digest of {part.name}", expected=part.digest, got=got
            )
