"""Reads ``events.1.jsonl`` and ``events.jsonl``: all of it, then only what was added.

Whoever wrote the directory chose the lines: files are opened without following links, their sizes
are bounded, and a line that is too long, or not one JSON object, is skipped and counted. Nothing is
locked and nothing is written, so a run that appends meanwhile does not notice.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checkfreq.errors import NoCheckpointError, StorageError, storage_errors
from checkfreq.events import older_generation
from checkfreq.store.fileops import LocalFileOps, ReadFile
from checkfreq.types import Json

NAME = "events.jsonl"
#: Far above what `CFConfig.max_events_bytes` makes of a run; a larger file is refused.
MOST_BYTES = 1 << 30
#: Read at once, and the length from which a line is skipped: no event is so long.
_READ_BYTES = 4 << 20
#: Lines that are parsed at once: all objects of a large file together do not fit any cache.
_PIECE_BYTES = 256 << 10


@dataclass(slots=True)
class _Place:
    """How far a file was read: which file it is, and where the next line begins.

    ``is_in_long_line``: the offset is within a line that is too long to be an event.
    """

    identity: tuple[int, int]
    offset: int = 0
    is_in_long_line: bool = False


class EventReader:
    """Reads a directory's events, oldest first. ``num_skipped``: lines that are no JSON object."""

    def __init__(self, chk_dir: Path) -> None:
        self.chk_dir = chk_dir
        self.num_skipped = 0
        self._path = chk_dir / NAME
        self._ops = LocalFileOps(chk_dir, direct=False)
        self._place: _Place | None = None
        self._older: _Place | None = None

    def require(self) -> None:
        """NoCheckpointError unless there are events."""
        with storage_errors(f"{self._path}: cannot read events"):
            there = self._ops.listdir(self.chk_dir) if self._ops.is_dir(self.chk_dir) else ()
        if NAME not in there and older_generation(self._path).name not in there:
            raise NoCheckpointError(
                f"{self.chk_dir}: expected a checkpoint directory with events.jsonl, found none: "
                "give the chk_dir of a CFManager that has trained"
            )

    def new(self) -> list[Json]:
        """The events since the last call; the first time, all that there are."""
        return list(self.each())

    def each(self) -> Iterator[Json]:
        """As `new`, one by one, a few hundred in memory at a time. Take all of them."""
        with storage_errors(f"{self._path}: cannot read events"):
            yield from self._events()

    def _events(self) -> Iterator[Json]:
        older, now = older_generation(self._path), self._identity(self._path)
        if self._place is None or self._place.identity != now:
            # The file that was being read, if any, has been renamed. If it is not there under its
            # new name either, it was replaced more than once meanwhile: all of that one is new.
            renamed = self._identity(older)
            if renamed is not None:
                known = (place for place in (self._place, self._older) if place is not None)
                same = (place for place in known if place.identity == renamed)
                self._older = next(same, _Place(renamed))
                yield from self._lines(older, self._older)
            self._place = None if now is None else _Place(now)
        if self._place is not None:
            yield from self._lines(self._path, self._place)

    def _identity(self, path: Path) -> tuple[int, int] | None:
        try:
            return self._ops.identity(path)
        except FileNotFoundError:
            return None

    def _lines(self, path: Path, place: _Place) -> Iterator[Json]:
        try:
            file = self._ops.open_for_read(path)
        except FileNotFoundError:
            return
        try:
            if file.size > MOST_BYTES:
                text = f"expected at most {MOST_BYTES} bytes, found {file.size}"
                raise StorageError(errno.EFBIG, text, str(path))
            if self._identity(path) == place.identity:  # else renamed just now: read next time
                yield from self._from(file, place)
        finally:
            file.close()

    def _from(self, file: ReadFile, place: _Place) -> Iterator[Json]:
        """What comes after ``place``, which moves along; a line that is being written is left."""
        begun, buffer = b"", bytearray(max(0, min(_READ_BYTES, file.size - place.offset)))
        while count := file.preadinto(memoryview(buffer), place.offset + len(begun)):
            data = begun + buffer[:count]
            end = data.rfind(b"\n") + 1
            start = 0
            if place.is_in_long_line and end:  # which ends here
                start, place.is_in_long_line = data.find(b"\n") + 1, False
                self.num_skipped += 1
            place.offset += end
            begun = data[end:]
            if place.is_in_long_line or len(begun) >= _READ_BYTES:
                place.offset += len(begun)
                begun, place.is_in_long_line = b"", True
            while start < end:
                stop = data.find(b"\n", min(start + _PIECE_BYTES, end) - 1) + 1
                yield from self._parsed(data[start:stop])
                start = stop

    def _parsed(self, data: bytes) -> Iterator[Json]:
        lines = data.splitlines()
        try:  # all at once takes half the time of line by line
            found = json.loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            found = None
        if found is None or len(found) != len(lines):
            found = [self._one(line) for line in lines]
        for event in found:
            if isinstance(event, dict):
                yield event
            else:
                self.num_skipped += 1

    @staticmethod
    def _one(line: bytes) -> Json:
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None
