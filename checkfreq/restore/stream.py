"""Reads tensors of a checkpoint piece by piece, and copies each piece into its place.

Several threads read, each into a buffer of its own that stays in the processor's cache: there the
bytes are digested, and from there they are copied. So a restore takes about as long as the read,
and no more memory than the buffers. What has arrived in a target before an error stays there:
targets hold parts of a damaged checkpoint until an older one overwrites them. No torch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_hexdigest

from checkfreq import faults
from checkfreq.errors import CorruptCheckpointError
from checkfreq.restore.buffers import Buffers, HostBuffers, MemoryTarget, Wait, finish
from checkfreq.restore.reads import Run, Target, Task, Wanted, tasks_of
from checkfreq.restore.shared_reads import SharedReads
from checkfreq.store.fileops import FileInMemory, ReadFile
from checkfreq.store.gc_pause import gc_paused
from checkfreq.store.manifest import FileEntry
from checkfreq.store.source import CheckpointSource
from checkfreq.types import PAGE_BYTES, round_up_to_page

__all__ = ["MOST_THREADS", "NUM_THREADS", "Buffers", "MemoryTarget", "Target", "Wanted", "stream"]

#: Threads that read, unless the caller or the source wants more.
NUM_THREADS = 4
#: A read that takes so long, in seconds, waits for a server or a slow disk: 1 MiB takes 1 to 2 ms
#: from a disk that four threads keep busy. Where as many in a row as there are threads take so long
#: there are twice as many from then on, up to MOST_THREADS. A single one says nothing: with sixteen
#: threads on two cores a fast disk was read at half its speed (2026-11).
_SLOW_READ_S = 0.01
MOST_THREADS = 16


def stream(
    source: CheckpointSource,
    step: int,
    wanted: Sequence[Wanted],
    *,
    num_threads: int = NUM_THREADS,
    read_bytes: int | None = None,
    buffers: Buffers | None = None,
    on_read: Callable[[int], object] = lambda num_bytes: None,
    verify_headers: bool = True,
    shared: SharedReads | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Read what is wanted of a committed step, check every digest, and fill the targets.

    ``num_threads``: 1 means the caller's. A source may need more, and where reads are slow more are
    started. ``read_bytes``: most bytes of a read, a multiple of a page; the source's own by
    default. ``buffers`` have `buffer_bytes` of that, for any number of threads. The reading threads
    tell ``on_read`` how many bytes with a digest have arrived. ``shared``: with other ranks, which
    may read the same. Copies that are under way when a target returns are waited for by
    ``buffers``: with `HostBuffers`, all are done when this returns or raises.

    Raises CorruptCheckpointError at the first wrong size, wrong digest or missing file; other
    OSErrors, and what a target raises, pass through.
    """
    size = read_bytes or source.read_bytes
    assert size % PAGE_BYTES == 0
    with contextlib.ExitStack() as stack:
        jobs = []
        for entry, items in _by_file(wanted):
            file = source.open_payload(step, entry)
            stack.callback(file.close)
            view = file.view if isinstance(file, FileInMemory) else None
            place = _Place(file, entry.name, source.where(step, entry.name), view)
            borders = [piece.start for piece in source.pieces(step, entry)]
            with gc_paused():  # there may be a million tensors
                tasks = tasks_of(
                    entry, items, read_bytes=size, borders=borders, with_header=verify_headers
                )
            jobs += [_Job(place, task) for task in tasks]
        reading = _Reading(
            _in_order(jobs, size, shared),
            buffers or HostBuffers(size),
            size,
            on_read,
            shared,
            clock=clock,
        )
        reading.run(max(num_threads, source.num_requests))


class SlowReads:
    """Whether reads are so slow that more of them should be under way; one thread at a time."""

    def __init__(self) -> None:
        self._in_row = 0

    def note(self, seconds: float, num_threads: int) -> bool:
        """A read took so long: True once as many in a row as there are threads were slow."""
        self._in_row = self._in_row + 1 if seconds >= _SLOW_READ_S else 0
        if self._in_row < num_threads:
            return False
        self._in_row = 0
        return True


class _Place(NamedTuple):
    """An open file, its name, where it is, and how to see its bytes if they are in memory."""

    file: ReadFile
    name: str
    path: str
    view: Callable[[int, int], memoryview] | None


class _Job(NamedTuple):
    """``number``: among the pieces that are shared with other ranks; None if it is not."""

    place: _Place
    task: Task
    number: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.task.end - self.task.start


def _by_file(wanted: Iterable[Wanted]) -> Iterator[tuple[FileEntry, Sequence[Wanted]]]:
    found: dict[str, list[Wanted]] = {}
    for item in wanted:
        found.setdefault(item.file.name, []).append(item)
    for items in found.values():
        yield items[0].file, items


def _in_order(jobs: Sequence[_Job], size: int, shared: SharedReads | None) -> list[_Job]:
    """Those first that other ranks wait for. Then long ones: each is for a single thread."""
    numbers = {} if shared is None else shared.agree(_cuts(jobs, size))
    mine: list[_Job] = []
    common: list[_Job] = []
    for job in jobs:
        number = numbers.get((job.place.name, job.task.start))
        (mine if number is None else common).append(job._replace(number=number))
    mine.sort(key=lambda job: job.num_bytes > size, reverse=True)
    if shared is not None:
        common.sort(key=lambda job: shared.place(job.number or 0))
    return common + mine


def _cuts(jobs: Iterable[_Job], size: int) -> dict[str, list[tuple[int, int]]]:
    """By file, from where to where each read goes that others may need as well."""
    found: dict[str, list[tuple[int, int]]] = {}
    for job in jobs:
        if 0 < job.num_bytes <= size and job.place.view is None:
            found.setdefault(job.place.name, []).append((job.task.start, job.task.end))
    return found


class _Reading:
    """The jobs of one call, and the threads that do them."""

    def __init__(
        self,
        jobs: Sequence[_Job],
        buffers: Buffers,
        read_bytes: int,
        on_read: Callable[[int], object],
        shared: SharedReads | None,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._jobs = deque(jobs)
        self._shared = shared
        self._buffers = buffers
        self._read_bytes = read_bytes
        self._on_read = on_read
        self._most_threads = MOST_THREADS
        self._clock = clock
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # for the list, and how many reads were slow
        self._slow_reads = SlowReads()
        self._errors: list[BaseException] = []
        self._stop = threading.Event()

    def run(self, num_threads: int) -> None:
        """Do all jobs; raises the first error, after every thread has ended."""
        count = min(num_threads, len(self._jobs))
        if count <= 1:  # in the caller's thread, and in no other
            self._most_threads = 0
            self._work()
        else:
            self._in_threads(count)
        if self._errors:
            raise self._errors[0]

    def _in_threads(self, count: int) -> None:
        try:
            for _ in range(count):
                self._start_thread(count)
            for thread in self._threads:  # more may be added meanwhile, by those that still run
                thread.join()
        except BaseException:  # an interrupt, for example
            self._give_up()
            raise
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def _start_thread(self, most: int) -> None:
        with self._lock:
            self._start_one(most)

    def _start_one(self, most: int) -> None:
        number = len(self._threads)
        if number < most and not self._stop.is_set():
            name = f"checkfreq-read-{number}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _note_read(self, seconds: float) -> None:
        with self._lock:
            num_threads = len(self._threads)
            if self._slow_reads.note(seconds, num_threads) and self._jobs:
                with contextlib.suppress(RuntimeError):  # no more threads are allowed
                    for _ in range(num_threads):
                        self._start_one(self._most_threads)

    def _work(self) -> None:
        try:
            while not self._stop.is_set() and (job := self._next()) is not None:
                if job.num_bytes > self._read_bytes:
                    self._read_long(job.place, job.task.runs[0])
                else:
                    self._read_short(job.place, job.task, job.number)
        except BaseException as error:
            self._errors.append(error)
            self._give_up()

    def _give_up(self) -> None:
        """End all threads soon; none waits for other ranks any more."""
        self._stop.set()
        if self._shared is not None:
            self._shared.leave("an error on this rank")

    def _next(self) -> _Job | None:
        try:
            return self._jobs.popleft()
        except IndexError:
            return None

    def _read_short(self, place: _Place, task: Task, number: int | None) -> None:
        num_bytes = 0
        fill = partial(self._fill, place.file, number)
        with _Bytes(place, task.start, task.end, self._buffers, fill) as data:
            for run in task.runs:
                part = data.view[run.start - task.start : run.end - task.start]
                _check(place.path, run, xxh3_64_hexdigest(part))
                _hand(run, run.start, part, data.waits)
                num_bytes += len(part)
        self._on_read(num_bytes)

    def _read_long(self, place: _Place, run: Run) -> None:
        digest = xxh3_64()
        fill = partial(self._fill, place.file, None)
        for at in range(run.start, run.end, self._read_bytes):
            if self._stop.is_set():
                return
            end = min(at + self._read_bytes, run.end)
            with _Bytes(place, at, end, self._buffers, fill) as data:
                digest.update(data.view)
                _hand(run, at, data.view, data.waits)
            self._on_read(end - at)
        _check(place.path, run, digest.hexdigest())

    def _fill(
        self, file: ReadFile, number: int | None, buffer: memoryview, start: int, end: int
    ) -> memoryview:
        """Bytes ``start`` to ``end`` of a file, in ``buffer``: by whole pages, for direct I/O."""
        first = start // PAGE_BYTES * PAGE_BYTES
        num_bytes = min(round_up_to_page(end), file.size) - first
        read = partial(self._read, file, buffer, first, num_bytes)
        if self._shared is None or number is None:
            read()
        else:
            self._shared.fill(number, buffer[:num_bytes], read)
        return buffer[start - first : end - first]

    def _read(self, file: ReadFile, buffer: memoryview, first: int, num_bytes: int) -> None:
        faults.reach("restore.read")
        began_s = self._clock()
        got = file.preadinto(buffer[: round_up_to_page(num_bytes)], first)
        self._note_read(self._clock() - began_s)
        if got != num_bytes:
            raise OSError(f"expected {num_bytes} bytes at byte {first}, got {got}: the file shrank")


#: Fills a buffer from the page of a byte of a file up to another, and returns what is between.
_Fill = Callable[[memoryview, int, int], memoryview]


class _Bytes:
    """Bytes of a file, read into a buffer that is given back at the end of the ``with`` block.

    ``waits``: what targets returned, for copies that are still under way then.
    """

    __slots__ = ("_buffer", "_buffers", "_fill", "_place", "_range", "view", "waits")

    def __init__(self, place: _Place, start: int, end: int, buffers: Buffers, fill: _Fill) -> None:
        self._place = place
        self._fill = fill
        self._range = start, end
        self._buffers = buffers
        self._buffer: memoryview | None = None
        self.view = memoryview(b"")
        self.waits: list[Wait] = []

    def __enter__(self) -> _Bytes:
        start, end = self._range
        if start == end:  # only tensors without elements
            return self
        if self._place.view is not None:
            faults.reach("restore.read")
            self.view = self._place.view(start, end - start)
            return self
        self._buffer = self._buffers.take()
        try:
            self.view = self._fill(self._buffer, start, end)
        except BaseException:
            self._buffers.give(self._buffer, ())
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._buffer is None:
            finish(self.waits)
        else:
            self._buffers.give(self._buffer, self.waits)


def _check(path: str, run: Run, got: str) -> None:
    if got != run.digest:
        raise CorruptCheckpointError(
            path, check=f"digest of {run.name}", expected=run.digest, got=got
        )


def _hand(run: Run, at: int, data: memoryview, waits: list[Wait]) -> None:
    """Give targets what they want of ``data``, which begins at byte ``at`` of the file."""
    for sink in run.sinks:
        for begin, end in sink.overlaps(at, at + len(data)):
            wait = sink.target.put(begin - sink.origin, data[begin - at : end - at])
            if wait is not None:
                waits.append(wait)
