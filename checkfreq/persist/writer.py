"""Writes one snapshot from an arena slot to the files of a pending checkpoint.

Several threads write page-aligned chunks with direct I/O, and compute the digests from the same
memory between writes. There is no serialization and no copy: the slot's bytes are the files'
bytes. Writing and hashing release the GIL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Protocol

from xxhash import xxh3_64_hexdigest

from checkfreq import faults
from checkfreq.store.digests import num_pieces, spans
from checkfreq.store.manifest import FileEntry, TensorEntry
from checkfreq.types import FileSpec, TensorSpec, round_up_to_page

#: Pieces of tensors are hashed in groups of about this size: with ten thousand small tensors, a
#: task for each would cost more to schedule than to run.
_DIGEST_GROUP_BYTES = 32 << 20
#: The number of a tensor in its file, that of the piece in the tensor, and its bytes in the file.
_Piece = tuple[int, int, int, int]


class Payload(Protocol):
    """The part of a store's payload file that the writer uses."""

    @property
    def direct(self) -> bool: ...
    def pwrite(self, view: memoryview, offset: int) -> None: ...


class RateLimiter:
    """Delays writes so that their rate stays under a limit; None means no limit."""

    def __init__(
        self, max_bytes_per_s: int | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._lifted = threading.Event()
        self._next_start_s = clock()

    def wait_for(self, num_bytes: int) -> None:
        """Return when ``num_bytes`` more may be written."""
        if self._max_bytes_per_s is None or self._lifted.is_set():
            return
        with self._lock:
            start_s = max(self._clock(), self._next_start_s)
            self._next_start_s = start_s + num_bytes / self._max_bytes_per_s
        # Outside the lock, so that the next thread can take its turn; on the event, so that
        # ``lift`` ends the wait.
        self._lifted.wait(start_s - self._clock())

    def lift(self) -> None:
        """Drop the limit, also for threads that are waiting: the trainer is gone."""
        self._lifted.set()


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The entries of the files written, and whether all writes bypassed the page cache."""

    files: tuple[FileEntry, ...]
    direct: bool


class SnapshotWriter:
    """A pool of writer threads, made once per worker."""

    def __init__(self, *, num_threads: int, chunk_bytes: int, limiter: RateLimiter) -> None:
        self._chunk_bytes = chunk_bytes
        self._limiter = limiter
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="checkfreq-writer")

    def write(
        self, files: Sequence[FileSpec], slot: memoryview, payloads: Sequence[Payload]
    ) -> WriteResult:
        """Write each file image in ``slot`` to its payload, without syncing.

        The last chunk of a file is padded to a page boundary: the caller truncates the file.
        Raises the first OSError of any thread, after all threads have stopped.
        """
        digests = {file.name: FileDigests(file, slot) for file in files}
        stop = threading.Event()
        tasks = _interleave(
            chain.from_iterable(
                self._write_tasks(file, slot, payload, stop)
                for file, payload in zip(files, payloads, strict=True)
            ),
            chain.from_iterable(digests[file.name].tasks() for file in files),
        )
        self._run(tasks, stop)
        entries = tuple(found.entry() for found in digests.values())
        return WriteResult(entries, direct=all(payload.direct for payload in payloads))

    def _run(self, tasks: Iterator[Callable[[], None]], stop: threading.Event) -> None:
        futures: list[Future[None]] = [self._pool.submit(task) for task in tasks]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            stop.set()  # after a failure, tasks that have not begun return at once
            wait(futures)  # no thread may still read the slot once it is given back

    def _write_tasks(
        self, file: FileSpec, slot: memoryview, payload: Payload, stop: threading.Event
    ) -> Iterator[Callable[[], None]]:
        end = round_up_to_page(file.num_bytes)
        for start in range(0, end, self._chunk_bytes):
            size = min(self._chunk_bytes, end - start)
            at = file.slot_offset + start
            yield self._write_task(slot[at : at + size], payload, start, stop)

    def _write_task(
        self, view: memoryview, payload: Payload, offset: int, stop: threading.Event
    ) -> Callable[[], None]:
        def task() -> None:
            if not stop.is_set():
                self._limiter.wait_for(len(view))
                faults.reach("commit.write")
                payload.pwrite(view, offset)

        return task


class FileDigests:
    """Computes the digests of one file's image in a slot, in tasks for several threads."""

    def __init__(self, file: FileSpec, slot: memoryview) -> None:
        self._file = file
        self._image = slot[file.slot_offset : file.slot_offset + file.num_bytes]
        self._header = ""
        self._pieces: list[list[str]] = [[""] * num_pieces(tensor) for tensor in file.tensors]

    def tasks(self) -> Iterator[Callable[[], None]]:
        """What to call, in any order, before `entry`."""
        yield self._digest_header
        group: list[_Piece] = []
        num_bytes = 0
        for index, tensor in enumerate(self._file.tensors):
            for number, (begin, end) in enumerate(spans(tensor)):
                group.append((index, number, tensor.offset + begin, tensor.offset + end))
                num_bytes += end - begin
                if num_bytes >= _DIGEST_GROUP_BYTES:
                    yield partial(self._digest, group)
                    group, num_bytes = [], 0
        if group:
            yield partial(self._digest, group)

    def _digest_header(self) -> None:
        self._header = xxh3_64_hexdigest(self._image[: self._file.header_bytes])

    def _digest(self, group: Sequence[_Piece]) -> None:
        for index, number, begin, end in group:
            self._pieces[index][number] = xxh3_64_hexdigest(self._image[begin:end])

    def entry(self) -> FileEntry:
        """The file's entry in the commit record."""
        file = self._file
        return FileEntry(
            name=file.name,
            num_bytes=file.num_bytes,
            header_bytes=file.header_bytes,
            header_digest=self._header,
            tensors=tuple(map(_tensor_entry, file.tensors, self._pieces)),
        )


def digest(
    files: Sequence[FileSpec], slot: memoryview, *, num_threads: int
) -> tuple[FileEntry, ...]:
    """The entries of file images in ``slot``, without writing them."""
    digests = [FileDigests(file, slot) for file in files]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="checkfreq-digest") as pool:
        futures = [pool.submit(task) for one in digests for task in one.tasks()]
    for future in futures:
        future.result()
    return tuple(one.entry() for one in digests)


def _tensor_entry(tensor: TensorSpec, digests: Sequence[str]) -> TensorEntry:
    return TensorEntry(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        offset=tensor.offset,
        num_bytes=tensor.num_bytes,
        digest="".join(digests),
        piece_bytes=tensor.piece_bytes,
    )


def _interleave(
    writes: Iterator[Callable[[], None]], digests: Iterator[Callable[[], None]]
) -> Iterator[Callable[[], None]]:
    """Alternate them, so that the disk is not idle while digests are computed."""
    for pair in zip_longest(writes, digests):
        yield from (task for task in pair if task is not None)
