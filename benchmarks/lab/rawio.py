"""The speed of the disk without checkfreq: direct, synced writes and reads of the same bytes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from checkfreq.restore.buffers import new_buffer

PAGE = 4096
_MADE_AT_ONCE = 8 << 20


@dataclass(frozen=True, slots=True)
class RawWrite:
    """Median rate of writing ``num_bytes`` to a new file and syncing it; direct I/O or not."""

    num_bytes: int
    bytes_per_s: float
    direct: bool


def raw_write(
    folder: Path, *, num_bytes: int, threads: int = 4, chunk_bytes: int = 8 << 20, rounds: int = 5
) -> RawWrite:
    """Write ``num_bytes`` of incompressible data to a scratch file in ``folder``, ``rounds`` times.

    The file is created each time, as a checkpoint is. Where direct I/O is refused (tmpfs,
    some network mounts) the writes are buffered.
    """
    path = folder / ".raw-write"
    with RawWriter(path, num_bytes, threads=threads, chunk_bytes=chunk_bytes) as writer:
        seconds = [writer.once() for _ in range(rounds)]
        return RawWrite(num_bytes, num_bytes / statistics.median(seconds), writer.direct)


class RawWriter:
    """The data is created once, so that several processes can start writing at the same instant.

    With ``source_bytes`` only that much is created, and written repeatedly.
    """

    def __init__(
        self,
        path: Path,
        num_bytes: int,
        *,
        threads: int = 4,
        chunk_bytes: int = 8 << 20,
        source_bytes: int | None = None,
    ) -> None:
        self._path, self._threads, self._chunk_bytes = path, threads, chunk_bytes
        self._num_bytes = -(-num_bytes // PAGE) * PAGE
        made = self._num_bytes
        if source_bytes is not None:
            made = min(made, -(-source_bytes // chunk_bytes) * chunk_bytes)
        self._source = incompressible(made)
        self.direct = _accepts_direct(path, self._source)

    def once(self) -> float:
        """Seconds until the data is in a new file and synced."""
        return write_once(
            self._path,
            self._source,
            direct=self.direct,
            threads=self._threads,
            chunk_bytes=self._chunk_bytes,
            num_bytes=self._num_bytes,
        )

    def read_back(self, *, fresh: bool = False) -> float:
        """Seconds to read the file into the memory it was written from, or into new memory."""
        memory = new_buffer(self._num_bytes) if fresh else memoryview(self._source)
        with memory:
            return read_once(
                self._path,
                memory,
                self._num_bytes,
                direct=self.direct,
                threads=self._threads,
                chunk_bytes=self._chunk_bytes,
            )

    def __enter__(self) -> RawWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        self._source.close()


def incompressible(num_bytes: int) -> mmap.mmap:
    """Random data in private huge pages: the fastest memory to write from and read into."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, num_bytes, _MADE_AT_ONCE):
        memory.write(os.urandom(min(_MADE_AT_ONCE, num_bytes - start)))
    return memory


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Make the next read of these files go to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _open(path: Path, *, direct: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)


def _accepts_direct(path: Path, source: mmap.mmap) -> bool:
    try:
        descriptor = _open(path, direct=True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    try:
        with memoryview(source) as view:
            os.pwrite(descriptor, view[:PAGE], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def write_once(
    path: Path,
    source: mmap.mmap,
    *,
    direct: bool,
    threads: int,
    chunk_bytes: int,
    num_bytes: int | None = None,
    fill: Callable[[int, int], None] = lambda start, end: None,
) -> float:
    """Seconds to write ``source`` to a new file and sync it.

    With ``num_bytes``, repeatedly until it is that long (``source`` is whole chunks then). The
    threads call ``fill`` for each stretch of ``source`` before it is written.
    """
    path.unlink(missing_ok=True)
    began_s = time.perf_counter()
    descriptor = _open(path, direct=direct)
    try:
        with memoryview(source) as view, ThreadPoolExecutor(threads) as pool:
            total = len(view) if num_bytes is None else num_bytes

            def write(offset: int) -> None:
                start = offset % len(view)
                end = start + min(chunk_bytes, total - offset)
                fill(start, end)
                _write_all(descriptor, view[start:end], offset)

            list(pool.map(write, range(0, total, chunk_bytes)))
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    return time.perf_counter() - began_s


def read_once(
    path: Path,
    view: memoryview,
    num_bytes: int,
    *,
    direct: bool,
    threads: int,
    chunk_bytes: int,
    then: Callable[[memoryview, int], None] = lambda chunk, offset: None,
) -> float:
    """Seconds to read a file of ``num_bytes`` into ``view``, repeatedly if that is shorter.

    The threads call ``then`` with each chunk of the file and its offset. Raises EOFError if the
    file is shorter.
    """
    began_s = time.perf_counter()
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    descriptor = os.open(path, flags)
    try:
        with ThreadPoolExecutor(threads) as pool:

            def read(offset: int) -> None:
                start = offset % len(view)
                with view[start : start + min(chunk_bytes, num_bytes - offset)] as chunk:
                    _read_all(descriptor, chunk, offset)
                    then(chunk, offset)

            list(pool.map(read, range(0, num_bytes, chunk_bytes)))
    finally:
        os.close(descriptor)
    return time.perf_counter() - began_s


def _read_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        if not (count := os.preadv(descriptor, [view[done:]], offset + done)):
            raise EOFError(f"the file ends at {offset + done}, {len(view) - done} bytes early")
        done += count


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    with view:
        done = 0
        while done < len(view):
            done += os.pwrite(descriptor, view[done:], offset + done)
