"""One checkpoint to the object store: pieces, manifest, and the marker last.

What is there already, by the service's list, is not sent again: pieces of the checkpoint before
that have not changed, and those that an upload had sent before it was interrupted. One damaged
object would make every checkpoint worthless that names it: when a second one does, it is read
back (`Uploader.verify_next`), and at the latest after `_MOST_LINKS` of them it is sent anew. Every
tensor's digest is compared with the manifest while it is read, so a damaged checkpoint is not
mirrored.
Before the marker is written, the service must list every object with its length and the tag that
it answered with; the marker is read back.

`Uploader.upload` belongs to the mirror's thread. Pieces are read, digested and sent by a few
threads; none of that holds the interpreter's lock. At most `_THREADS` pieces of at most
`HELD_BYTES` are in memory at a time.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import xxhash

from checkfreq import faults
from checkfreq.errors import CorruptCheckpointError, StorageError
from checkfreq.mirror.bandwidth import Bandwidth
from checkfreq.mirror.client import RemoteObjects, Seen
from checkfreq.mirror.layout import (
    OBJECTS,
    Blob,
    Marker,
    digest_of,
    manifest_key,
    marker_key,
)
from checkfreq.mirror.pieces import Run, Unit, cut, runs_of
from checkfreq.store.digests import PieceDigests, digest_pieces
from checkfreq.store.fileops import ReadFile
from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.store.store import CheckpointStore
from checkfreq.store.tree import Tree
from checkfreq.types import PAGE_BYTES, round_up_to_page

_THREADS = 4
#: A longer piece, which is a single tensor, is read twice: to digest it, and to send it.
HELD_BYTES = 64 << 20
_CHUNK_BYTES = 8 << 20
#: So many uploads may name an object in a row without sending it; on disk as many share a file.
_MOST_LINKS = 20
#: How often the mirror's thread looks up while pieces are being sent.
_LOOK_S = 0.5


class UploadAbandonedError(Exception):
    """The upload is not worth finishing: a newer checkpoint is waiting, or time is up."""


@dataclass(frozen=True, slots=True)
class Uploaded:
    """An upload that is complete. ``sent_bytes``: what had to be sent of its pieces."""

    marker: Marker
    sent_bytes: int
    seconds: float


@dataclass(slots=True)
class _Work:
    """One upload in progress. Threads add to ``sent`` (tags by key) and ``sent_bytes``."""

    store: CheckpointStore
    step: int
    there: Mapping[str, Seen]
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    sent: dict[str, str | None] = field(default_factory=dict)
    sent_bytes: int = 0

    def holds(self, blob: Blob) -> bool:
        """Whether the object is there, by the list or because it was sent."""
        with self.lock:
            if blob.key in self.sent:
                return True
        seen = self.there.get(blob.key)
        return seen is not None and seen.num_bytes == blob.num_bytes

    def note(self, blob: Blob, e_tag: str | None) -> None:
        """The object was sent."""
        with self.lock:
            self.sent[blob.key] = e_tag
            self.sent_bytes += blob.num_bytes


class Uploader:
    """Uploads checkpoints of ``store``, and remembers the pieces of the last one.

    ``go_on`` is called every half second, with the part of the pieces that are being sent, which
    cannot be recalled; and, once all are sent, with None. It raises to end the upload; what was
    sent whole by then is finished all the same, unless it raises again.
    """

    def __init__(
        self,
        remote: RemoteObjects,
        store: CheckpointStore,
        *,
        bandwidth: Bandwidth,
        part_bytes: int,
        go_on: Callable[[float | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._remote = remote
        self._store = store
        self._bandwidth = bandwidth
        self._part_bytes = part_bytes
        self._go_on = go_on
        self._clock = clock
        self._before: dict[str, list[Run]] = {}
        #: Of what the last upload named and did not send: how many in a row.
        self._links: dict[str, int] = {}
        #: Named for the first time by an upload that did not send it, with that upload's step.
        self._unverified: deque[tuple[int, Blob]] = deque()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="checkfreq-mirror")

    def remember(self, manifest: Manifest, marker: Marker) -> None:
        """``marker`` is there: its pieces need not be sent again where they have not changed."""
        self._before = {
            file.name: runs_of(file, marker.files.get(file.name, ())) for file in manifest.files
        }

    def upload(self, step: int, *, at_epoch_end: bool = False) -> Uploaded:
        """Upload a committed step.

        Raises NoCheckpointError if it was removed meanwhile, CorruptCheckpointError if it is
        damaged, OSError of the disk or the service, and what ``go_on`` raises.
        """
        start_s = self._clock()
        record = self._store.record(step)
        root = self._store.parse(step, record)
        manifest = self._store.whole(root)
        if isinstance(root, Tree):  # in the mirror a checkpoint has one record
            record = manifest.encode()
        there = {k: s for k, s in self._remote.list(OBJECTS).items() if self._may_link(k)}
        work = _Work(self._store, step, there)
        files = self._send_pieces(work, manifest)
        blob = Blob(manifest_key(step, manifest.attempt), len(record), digest_of(record))
        self._go_on(None)
        faults.reach("mirror.put_manifest")
        self._remote.put(blob.key, record)
        marker = Marker(step, manifest.attempt, manifest.created_unix_s, blob, files, at_epoch_end)
        faults.reach("mirror.verify")
        self._require_there(marker, work)
        self._go_on(None)
        faults.reach("mirror.put_marker")
        self._put_marker(marker)
        faults.reach("mirror.uploaded")
        self.remember(manifest, marker)
        self._note_links(marker, work)
        return Uploaded(marker, work.sent_bytes, self._clock() - start_s)

    def close(self) -> None:
        """End the threads, once what they send is sent."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    # ---- what is named and not sent

    @property
    def has_unverified(self) -> bool:
        """Whether there is something for `verify_next`."""
        return bool(self._unverified)

    def verify_next(self, *, go_on: Callable[[], None]) -> tuple[int, str] | None:
        """Read the next object back that an upload named and did not send.

        Returns that upload's step and what is wrong if it is not what was sent: uploading the step
        again sends it anew. ``go_on`` is called before each read, and raises to put it off.
        """
        step, blob = self._unverified[0]
        wrong = self._what_is_wrong(blob, go_on)
        self._unverified.popleft()
        if wrong:
            self._links[blob.key] = _MOST_LINKS
        return (step, wrong) if wrong else None

    def _what_is_wrong(self, blob: Blob, go_on: Callable[[], None]) -> str:
        digest = xxhash.xxh3_128()
        for start in range(0, blob.num_bytes, _CHUNK_BYTES):
            go_on()
            chunk = memoryview(bytearray(min(_CHUNK_BYTES, blob.num_bytes - start)))
            try:
                self._remote.read_into(blob.key, chunk, start=start)
            except OSError as error:
                return f"{blob.key} cannot be read back: {error}"
            digest.update(chunk)
        got = digest.hexdigest()
        return "" if got == blob.digest else f"{blob.key} was read back with the digest {got}"

    def _may_link(self, key: str) -> bool:
        return self._links.get(key, 0) < _MOST_LINKS

    def _note_links(self, marker: Marker, work: _Work) -> None:
        linked = {b.key: b for bs in marker.files.values() for b in bs if b.key not in work.sent}
        self._unverified = deque(one for one in self._unverified if one[1].key in linked)
        self._unverified += ((marker.step, b) for k, b in linked.items() if k not in self._links)
        self._links = {key: self._links.get(key, 0) + 1 for key in linked}

    # ---- pieces

    def _send_pieces(self, work: _Work, manifest: Manifest) -> dict[str, tuple[Blob, ...]]:
        with contextlib.ExitStack() as opened:
            tasks: dict[str, list[Future[Blob] | Blob]] = {}
            for entry in manifest.files:
                file = self._store.open_payload(work.step, entry)
                opened.callback(file.close)
                opened.callback(work.stopped.set)
                tasks[entry.name] = [
                    self._begin(work, entry, file, run) for run in self._cut(entry, work)
                ]
            futures = [t for ts in tasks.values() for t in ts if isinstance(t, Future)]
            try:
                self._wait(futures)
            except UploadAbandonedError:
                if not _end(work, futures):
                    raise
            finally:
                _end(work, futures)  # before the files are closed
        return {
            name: tuple(t.result() if isinstance(t, Future) else t for t in ts)
            for name, ts in tasks.items()
        }

    def _cut(self, entry: FileEntry, work: _Work) -> list[Run]:
        before = self._before.get(entry.name, [])
        return cut(entry, before=[_checked(run, work) for run in before])

    def _begin(
        self, work: _Work, entry: FileEntry, file: ReadFile, run: Run
    ) -> Future[Blob] | Blob:
        if run.blob is not None:
            return run.blob
        return self._pool.submit(self._send, work, entry.name, file, run)

    def _wait(self, futures: Sequence[Future[Blob]]) -> None:
        pending = set(futures)
        while pending:
            self._go_on(sum(future.running() for future in pending) / len(futures))
            done, pending = wait(pending, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()

    def _send(self, work: _Work, name: str, file: ReadFile, run: Run) -> Blob:
        """Read, check and send one piece, unless it is there (on a thread of the pool)."""
        path = self._store.where(work.step, name)
        if run.num_bytes > HELD_BYTES:
            return self._send_long(work, path, file, run)
        data = _read(file, run.offset, run.num_bytes, path)  # of its own: the client may keep it
        _check_units(data, run, path)
        blob = Blob.piece(digest_of(data), run.num_bytes)
        if not work.holds(blob):
            self._may_send(work, run.num_bytes)
            faults.reach("mirror.put_piece")
            work.note(blob, self._remote.put(blob.key, data))
        return blob

    def _send_long(self, work: _Work, path: str, file: ReadFile, run: Run) -> Blob:
        whole, unit = xxhash.xxh3_128(), PieceDigests(run.units[0])
        for chunk in _chunks(file, run, path, _CHUNK_BYTES):
            whole.update(chunk)
            unit.update(chunk)
            _require_going(work)
        _require_digest(unit.text(), run.units[0], path)
        blob = Blob.piece(str(whole.hexdigest()), run.num_bytes)
        if not work.holds(blob):
            self._may_send(work, 0)
            faults.reach("mirror.put_piece")
            parts = self._parts(work, file, run, path)
            work.note(blob, self._remote.put_stream(blob.key, parts, num_bytes=run.num_bytes))
        return blob

    def _parts(self, work: _Work, file: ReadFile, run: Run, path: str) -> Iterator[memoryview]:
        for chunk in _chunks(file, run, path, self._part_bytes):
            self._may_send(work, len(chunk))
            yield chunk

    def _may_send(self, work: _Work, num_bytes: int) -> None:
        _require_going(work)
        self._bandwidth.wait_for(num_bytes)
        _require_going(work)

    # ---- the marker

    def _require_there(self, marker: Marker, work: _Work) -> None:
        """StorageError unless the service lists every object that the marker names, as sent."""
        there = self._remote.list(OBJECTS)
        blobs = {piece.key: piece for pieces in marker.files.values() for piece in pieces}
        for key, blob in blobs.items():
            _require_same(self._remote.url, blob, there.get(key), work.sent.get(key))
        found = self._remote.head(marker.manifest.key)
        _require_same(self._remote.url, marker.manifest, found, None)

    def _put_marker(self, marker: Marker) -> None:
        data, key = marker.encode(), marker_key(marker.step)
        self._remote.put(key, data)
        got, _ = self._remote.get(key)
        if got != data:
            raise StorageError(
                errno.EIO,
                f"the marker was written with {len(data)} bytes and read back with {len(got)}, "
                "or different ones: the service does not store what it is sent",
                f"{self._remote.url}/{key}",
            )


def _checked(run: Run, work: _Work) -> Run:
    """The run, without its blob if that is not there any more."""
    return run if run.blob is None or work.holds(run.blob) else Run(run.units)


def _require_same(url: str, blob: Blob, seen: Seen | None, e_tag: str | None) -> None:
    expected = f"{blob.num_bytes} bytes"
    if seen is None:
        got = "nothing"
    elif seen.num_bytes != blob.num_bytes:
        got = f"{seen.num_bytes} bytes"
    elif e_tag is not None and seen.e_tag is not None and seen.e_tag != e_tag:
        expected, got = f"the tag {e_tag}", f"the tag {seen.e_tag}"
    else:
        return
    raise StorageError(
        errno.EIO,
        f"after it was sent: expected {expected}, the service lists {got}. It is sent again with "
        "the next try",
        f"{url}/{blob.key}",
    )


def _require_going(work: _Work) -> None:
    if work.stopped.is_set():
        raise UploadAbandonedError


def _end(work: _Work, futures: Sequence[Future[Blob]]) -> bool:
    """Wait until no thread uses the files any more; their requests have timeouts.

    Returns whether all was sent nevertheless.
    """
    work.stopped.set()
    for future in futures:
        future.cancel()
    wait(futures)
    return all(not future.cancelled() and future.exception() is None for future in futures)


def _read(file: ReadFile, offset: int, num_bytes: int, path: str) -> memoryview:
    """Bytes of a file, read in whole pages for direct I/O."""
    start = offset // PAGE_BYTES * PAGE_BYTES
    buffer = memoryview(mmap.mmap(-1, round_up_to_page(offset + num_bytes - start)))
    count = file.preadinto(buffer, start)
    if count < offset + num_bytes - start:
        raise CorruptCheckpointError(
            path, check="size in bytes", expected=offset + num_bytes, got=start + count
        )
    return buffer[offset - start : offset - start + num_bytes]


def _chunks(file: ReadFile, run: Run, path: str, chunk_bytes: int) -> Iterator[memoryview]:
    """The run's bytes; each chunk is memory of its own, since the client may still be sending."""
    for start in range(0, run.num_bytes, chunk_bytes):
        yield _read(file, run.offset + start, min(chunk_bytes, run.num_bytes - start), path)


def _check_units(data: memoryview, run: Run, path: str) -> None:
    for unit in run.units:
        start = unit.offset - run.offset
        got = digest_pieces(data[start : start + unit.num_bytes], unit)
        _require_digest(got, unit, path)


def _require_digest(got: str, unit: Unit, path: str) -> None:
    if got != unit.digest:
        raise CorruptCheckpointError(
            path,
            check=f"digest of the {unit.num_bytes} bytes at {unit.offset}",
            expected=unit.digest,
            got=got,
        )
