"""Reads checkpoints from a mirror: see `layout` for what lies there.

Nothing there is trusted: markers are validated, keys come from validated digests and so stay
under the prefix, and sizes are compared with what the store lists before memory is allocated.
Objects are read in ranges, by many threads, straight into the caller's memory. Each request is
repeated a bounded number of times; after that, and for credentials that are not accepted, it is a
StorageError. An object that is missing, or has the wrong size or content, is corruption. No torch.
"""

from __future__ import annotations

import errno
import logging
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from checkfreq.errors import CorruptCheckpointError, NoCheckpointError, StorageError
from checkfreq.mirror import layout
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import Blob, Finish, Marker
from checkfreq.mirror.settings import Mirror
from checkfreq.store.fileops import ReadFile
from checkfreq.store.manifest import MANIFEST_NAME, STATE_BYTES, FileEntry, Manifest, most_bytes
from checkfreq.store.marks import StepMark
from checkfreq.store.parts import part_name
from checkfreq.store.source import CheckpointSource, Piece
from checkfreq.store.tree import Tree
from checkfreq.store.verify import SizedFile, expect_size, header_bytes

logger = logging.getLogger(__name__)

#: Tries of one request, beyond those that the client makes by itself, and the pauses in between.
_TRIES = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 4.0
#: What no repetition changes: refusals, a missing bucket, what is no object or too large a one.
_FINAL = (errno.EACCES, errno.ENOENT, errno.ELOOP)
_NUM_REQUESTS = 16
#: A piece of several tensors has less than twice as much: one or two requests. Each has a buffer.
_READ_BYTES = 8 << 20

T = TypeVar("T")


class MirrorReader(CheckpointSource):
    """The checkpoints of one mirror. Only `ReadFile.preadinto` may be called by many threads."""

    is_local = False
    num_requests = _NUM_REQUESTS
    read_bytes = _READ_BYTES

    def __init__(self, mirror: Mirror, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._mirror = mirror
        self._objects = _Objects(RemoteObjects(mirror), sleep)
        self._markers: dict[int, Marker] = {}
        #: Sizes of the pieces that were there when they were last listed.
        self._sizes: dict[str, int] = {}

    @property
    def mirror(self) -> Mirror:
        """Where it reads."""
        return self._mirror

    @property
    def name(self) -> str:
        """The URL."""
        return self._mirror.url

    def where(self, step: int, file: str = "") -> str:
        """See CheckpointSource."""
        place = f"{self.name}/{layout.marker_key(step)}"
        return f"{place} ({file})" if file else place

    def steps(self) -> list[int]:
        """See CheckpointSource."""
        found = map(layout.step_of_marker, self._objects.sizes(layout.CHECKPOINTS))
        return sorted(step for step in found if step is not None)

    def holds(self, step: int) -> bool:
        """See CheckpointSource."""
        return step in self.steps()

    def ever_held(self) -> bool:
        """See CheckpointSource."""
        return bool(self.steps())

    def holds_superseded(self) -> bool:
        """See CheckpointSource."""
        return any(map(layout.is_superseded_key, self._objects.sizes(layout.SUPERSEDED)))

    def links(self) -> list[int]:
        """See CheckpointSource: there are none."""
        return []

    def log_links(self) -> None:
        """See CheckpointSource."""

    def attempt(self, step: int) -> str:
        """See CheckpointSource; reads only the marker."""
        return self._marker(step).attempt

    def record(self, step: int) -> bytes:
        """See CheckpointSource."""
        marker = self._marker(step)
        blob = marker.manifest
        most = STATE_BYTES if blob.num_bytes <= STATE_BYTES else self._most_record_bytes(marker)
        where = self.where(step, MANIFEST_NAME)
        if blob.num_bytes > most:
            raise CorruptCheckpointError(
                where, check="size in bytes", expected=f"at most {most}", got=blob.num_bytes
            )
        data = self._existing(step, lambda: self._objects.get(blob.key, most_bytes=blob.num_bytes))
        got = f"{len(data)} bytes, {layout.digest_of(data)}"
        if got != (expected := f"{blob.num_bytes} bytes, {blob.digest}"):
            raise CorruptCheckpointError(where, check="digest", expected=expected, got=got)
        return data

    def rank_record(self, step: int, rank: int) -> bytes:
        """See CheckpointSource: what is uploaded is the record with those of all ranks."""
        raise CorruptCheckpointError(
            self.where(step, part_name(rank)), check="record", expected="none", got="one"
        )

    def parse(self, step: int, record: bytes) -> Manifest | Tree:
        """See CheckpointSource."""
        manifest = super().parse(step, record)
        marker = self._markers.get(step)
        if marker is not None and marker.attempt != manifest.attempt:
            raise CorruptCheckpointError(
                self.where(step), check="attempt", expected=manifest.attempt, got=marker.attempt
            )
        return manifest

    def check_sizes(self, step: int, files: Iterable[SizedFile]) -> None:
        """See CheckpointSource. Asks for no piece by itself: all are listed with their sizes."""
        needed: dict[str, int] = {}
        for entry in files:
            blobs = self._blobs(step, entry)
            expect_size(self.where(step, entry.name), entry, sum(b.num_bytes for b in blobs))
            needed |= {blob.key: blob.num_bytes for blob in blobs}
        if not needed.keys() <= self._sizes.keys():
            self._sizes = self._objects.sizes(layout.OBJECTS)
        for key, num_bytes in needed.items():
            got = self._sizes.get(key)
            if got != num_bytes:
                self._require_marker(step)
                raise CorruptCheckpointError(
                    f"{self.name}/{key}",
                    check="size in bytes",
                    expected=num_bytes,
                    got="no such object" if got is None else got,
                )

    def open_payload(self, step: int, entry: FileEntry) -> ReadFile:
        """See CheckpointSource."""
        self.check_sizes(step, [entry])
        return _RemoteFile(self._blobs(step, entry), self._fetch_of(step))

    def pieces(self, step: int, entry: FileEntry) -> Sequence[Piece]:
        """See CheckpointSource."""
        blobs = [blob for blob in self._blobs(step, entry) if blob.num_bytes]
        starts = _starts(blobs)
        return [Piece(start, b.num_bytes, b.digest) for start, b in zip(starts, blobs, strict=True)]

    def marks(self) -> Mapping[int, StepMark]:
        """See CheckpointSource. Marks that cannot be parsed are skipped, with a warning."""
        marks: dict[int, StepMark] = {}
        try:
            if (data := self._small(layout.MARKS)) is not None:
                marks = layout.decode_marks(data, url=self.name)
            if (data := self._small(layout.FINISHED)) is not None:
                finish = Finish.decode(data, url=self.name)
                old = marks.get(finish.step, StepMark())
                marks[finish.step] = replace(old, finished=finish.finished)
        except CorruptCheckpointError as error:
            logger.warning("the marks in the mirror are not read: %s", error)
        return marks

    # ---- the pieces of reading

    def _marker(self, step: int) -> Marker:
        key = layout.marker_key(step)
        try:
            data = self._objects.get(key)
        except FileNotFoundError:
            raise NoCheckpointError(f"{self.name} holds no checkpoint of step {step}") from None
        marker = self._markers[step] = Marker.decode(data, key=key, url=self.name)
        return marker

    def _require_marker(self, step: int) -> None:
        """NoCheckpointError if the step was removed since: then nothing of it need be there."""
        if not self.holds(step):
            raise NoCheckpointError(f"{self.name} holds no checkpoint of step {step}")

    def _existing(self, step: int, read: Callable[[], T]) -> T:
        """``read()`` of an object that a marker names."""
        try:
            return read()
        except FileNotFoundError as error:
            self._require_marker(step)
            raise CorruptCheckpointError(
                str(error.filename), check="object", expected="to be there", got="no such object"
            ) from None

    def _blobs(self, step: int, entry: SizedFile) -> Sequence[Blob]:
        marker = self._markers.get(step) or self._marker(step)
        if entry.name not in marker.files:
            raise CorruptCheckpointError(
                self.where(step), check="files", expected=entry.name, got="no such file"
            )
        return marker.files[entry.name]

    def _fetch_of(self, step: int) -> Callable[[str, memoryview, int], None]:
        def fetch(key: str, view: memoryview, start: int) -> None:
            self._existing(step, lambda: self._objects.read_into(key, view, start))

        return fetch

    def _small(self, key: str) -> bytes | None:
        try:
            return self._objects.get(key)
        except FileNotFoundError:
            return None

    def _most_record_bytes(self, marker: Marker) -> int:
        """The largest record allowed, by the payloads beside it and their headers."""
        fetch = self._fetch_of(marker.step)
        files = [_RemoteFile(blobs, fetch) for blobs in marker.files.values()]
        return most_bytes(sum(map(header_bytes, files)), sum(file.size for file in files))


class _RemoteFile:
    """A payload file whose bytes lie in several objects."""

    direct = False

    def __init__(
        self, blobs: Sequence[Blob], fetch: Callable[[str, memoryview, int], None]
    ) -> None:
        self._blobs = [blob for blob in blobs if blob.num_bytes]
        self._starts = _starts(self._blobs)
        self._fetch = fetch
        self.size = sum(blob.num_bytes for blob in self._blobs)

    def preadinto(self, view: memoryview, offset: int) -> int:
        """See ReadFile."""
        wanted = max(min(len(view), self.size - offset), 0)
        done = 0
        while done < wanted:
            number = bisect_right(self._starts, offset + done) - 1
            blob, start = self._blobs[number], offset + done - self._starts[number]
            count = min(wanted - done, blob.num_bytes - start)
            self._fetch(blob.key, view[done : done + count], start)
            done += count
        return wanted

    def close(self) -> None:
        """See ReadFile."""


class _Objects:
    """The requests that a reader makes, each tried several times."""

    def __init__(self, objects: RemoteObjects, sleep: Callable[[float], None]) -> None:
        self._objects = objects
        self._sleep = sleep

    def sizes(self, prefix: str) -> dict[str, int]:
        """The objects under a prefix, with their sizes."""
        found = self._tried(lambda: self._objects.list(prefix))
        return {key: seen.num_bytes for key, seen in found.items()}

    def get(self, key: str, *, most_bytes: int = layout.SMALL_MAX_BYTES) -> bytes:
        """A whole small object; FileNotFoundError, and CorruptCheckpointError if it is larger."""
        try:
            return self._tried(lambda: self._objects.get(key, max_bytes=most_bytes))[0]
        except StorageError as error:
            if error.errno != errno.ELOOP:
                raise
            raise CorruptCheckpointError(
                str(error.filename), check="object", expected="a small one", got=error.strerror
            ) from None

    def read_into(self, key: str, view: memoryview, start: int) -> None:
        """Fill ``view`` from byte ``start`` of an object; FileNotFoundError."""
        self._tried(lambda: self._objects.read_into(key, view, start=start))

    def _tried(self, request: Callable[[], T]) -> T:
        """``request()``, repeated at growing pauses until it succeeds or never will."""
        pause_s = _FIRST_PAUSE_S
        for _ in range(_TRIES - 1):
            try:
                return request()
            except StorageError as error:
                if error.errno in _FINAL:
                    raise
            self._sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return request()


def _starts(blobs: Sequence[Blob]) -> list[int]:
    """Where each piece of a file begins."""
    starts, end = [], 0
    for blob in blobs:
        starts.append(end)
        end += blob.num_bytes
    return starts
