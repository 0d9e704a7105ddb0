"""Reads files of a checkpoint into memory, and verifies every digest on the way.

Several threads read chunks with direct I/O, while others digest the tensors whose chunks have
arrived, so that verifying costs hardly any time beside the read. Nothing is returned unless every
byte is what the manifest says. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from checkfreq.errors import CorruptCheckpointError, StorageError
from checkfreq.store.fileops import ReadFile
from checkfreq.store.manifest import FileEntry
from checkfreq.store.store import CheckpointStore
from checkfreq.types import PAGE_BYTES, round_up_to_page

#: One thread digests faster than a disk delivers; a second one works while it waits for a chunk.
_NUM_DIGEST_THREADS = 2


def buffer_bytes(files: Iterable[FileEntry]) -> int:
    """Bytes of buffer that ``read_files`` needs: every file rounded up to a page."""
    return sum(round_up_to_page(file.num_bytes) for file in files)


def new_buffer(num_bytes: int) -> memoryview:
    """Page-aligned memory for ``read_files``, freed with the last view of it.

    Private anonymous memory in huge pages: page faults in fresh shared memory took three times as
    long as the read itself on a virtual machine (measured 2026-11). Raises StorageError (ENOMEM)
    if there is not that much memory.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, max(num_bytes, PAGE_BYTES), flags=flags)
    except (OSError, OverflowError) as error:  # a sparse file can be larger than any memory
        text = f"reading needs {num_bytes} bytes of memory, more than there can be: {error}"
        raise StorageError(errno.ENOMEM, text) from None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def read_files(
    store: CheckpointStore,
    step: int,
    files: Sequence[FileEntry],
    buffer: memoryview,
    *,
    num_threads: int = 4,
    chunk_bytes: int = 8 << 20,
) -> Mapping[str, memoryview]:
    """Read files of a committed step into ``buffer`` (page aligned, ``buffer_bytes`` long).

    Returns the bytes of each file by name, as views of ``buffer``. Raises CorruptCheckpointError
    at the first wrong size, wrong digest or missing file; other OSErrors pass through.
    """
    found: dict[str, memoryview] = {}
    folder = store.path(step)
    start = 0
    with (
        ExitStack() as stack,
        ThreadPoolExecutor(num_threads, thread_name_prefix="checkfreq-read") as readers,
        ThreadPoolExecutor(_NUM_DIGEST_THREADS, thread_name_prefix="checkfreq-digest") as checkers,
    ):
        checks: list[Future[None]] = []
        for entry in files:
            file = store.open_payload(step, entry)
            stack.callback(file.close)
            area = buffer[start : start + round_up_to_page(entry.num_bytes)]
            start += len(area)
            reads = [
                readers.submit(_read_chunk, file, area, at, chunk_bytes)
                for at in range(0, entry.num_bytes, chunk_bytes)
            ]
            data = found[entry.name] = area[: entry.num_bytes]
            checks += _submit_checks(checkers, folder / entry.name, entry, data, reads, chunk_bytes)
        _first_error(checks)
    return found


def _first_error(checks: Sequence[Future[None]]) -> None:
    # In order, and each check waits for its reads: a failed read is raised here too.
    try:
        for check in checks:
            check.result()
    except BaseException:
        for check in checks:
            check.cancel()
        raise


def _read_chunk(file: ReadFile, area: memoryview, start: int, chunk_bytes: int) -> None:
    end = min(start + chunk_bytes, len(area))
    wanted = min(end, file.size) - start
    got = file.preadinto(area[start:end], start)
    if got != wanted:
        raise OSError(f"expected {wanted} bytes at byte {start}, got {got}: the file shrank")


def _submit_checks(
    pool: ThreadPoolExecutor,
    path: Path,
    entry: FileEntry,
    data: memoryview,
    reads: Sequence[Future[None]],
    chunk_bytes: int,
) -> Iterator[Future[None]]:
    parts = [("header", 0, entry.header_bytes, entry.header_digest)]
    parts += [(f"tensor {t.name}", t.offset, t.num_bytes, t.digest) for t in entry.in_file_order()]
    for group in _groups(parts, chunk_bytes):
        yield pool.submit(_check, str(path), data, group, reads, chunk_bytes)


_Part = tuple[str, int, int, str]


def _groups(parts: Sequence[_Part], chunk_bytes: int) -> Iterator[list[_Part]]:
    """Neighbouring parts, about a chunk together: fewer and larger tasks for the threads."""
    group: list[_Part] = []
    for part in parts:
        group.append(part)
        if part[1] + part[2] - group[0][1] >= chunk_bytes:
            yield group
            group = []
    if group:
        yield group


def _check(
    path: str,
    data: memoryview,
    parts: Sequence[_Part],
    reads: Sequence[Future[None]],
    chunk_bytes: int,
) -> None:
    for name, start, num_bytes, expected in parts:
        for index in range(start // chunk_bytes, -(-(start + num_bytes) // chunk_bytes)):
            reads[index].result()
        got = xxh3_64_hexdigest(data[start : start + num_bytes])
        if got != expected:
            raise CorruptCheckpointError(
                path, check=f"digest of {name}", expected=expected, got=got
            )
