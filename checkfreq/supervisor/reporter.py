"""A manager's side of the board: it tells ``checkfreq run`` where training stands.

Under no supervisor, or one that cannot be reached, every call does nothing. A boundary is one
write to memory; there is no system call and nothing to wait for. Training thread only.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from pathlib import Path

from checkfreq.supervisor.board import (
    ANEW,
    BOUNDARIES_AT,
    BOUNDARY,
    HEAD,
    NUM_BOUNDARIES,
    NUM_RECORDS,
    PATH_AT,
    RECORD,
    RECORD_BYTES,
    VARIABLE,
    State,
    open_board,
    start_of,
)


class Reporter:
    """Tells nobody; what `reporter_for` returns where there is a supervisor derives from it."""

    def begin(self, step: int, *, restored: bool) -> None:
        """Training goes on from ``step``, which was restored or not."""

    def pass_boundary(self, step: int) -> None:
        """``step`` was reached."""

    def end(self, state: State) -> None:
        """The manager is closed."""


class BoardReporter(Reporter):
    """Writes to one record of the board."""

    def __init__(self, record: mmap.mmap, *, path: bytes, rank: int) -> None:
        self._record = record
        self._path_bytes = len(path)
        self._rank = rank
        self._restored = ANEW
        record[PATH_AT : PATH_AT + len(path)] = path
        record[BOUNDARIES_AT:] = bytes(RECORD_BYTES - BOUNDARIES_AT)  # an earlier process's
        self._write_head(State.MADE)

    def begin(self, step: int, *, restored: bool) -> None:
        """See Reporter."""
        self._restored = step if restored else ANEW
        self.pass_boundary(step)
        self._write_head(State.TRAINING)

    def pass_boundary(self, step: int) -> None:
        """See Reporter."""
        BOUNDARY.pack_into(
            self._record,
            BOUNDARIES_AT + step % NUM_BOUNDARIES * BOUNDARY.size,
            step,
            time.monotonic(),
        )

    def end(self, state: State) -> None:
        """See Reporter."""
        self._write_head(state)

    def _write_head(self, state: State) -> None:
        RECORD.pack_into(
            self._record, 0, self._rank, os.getpid(), state, self._restored, self._path_bytes
        )


def reporter_for(chk_dir: Path, *, rank: int) -> Reporter:
    """What tells the supervisor that started this process about its run in ``chk_dir``."""
    fd = open_board(os.environ.get(VARIABLE, ""))
    if fd is None:
        return Reporter()
    try:
        with contextlib.suppress(OSError, ValueError):
            path = os.fsencode(os.path.abspath(chk_dir))
            if (index := _claim(fd, path, rank)) is not None:
                record = mmap.mmap(fd, RECORD_BYTES, offset=start_of(index))
                return BoardReporter(record, path=path, rank=rank)
    finally:
        os.close(fd)
    return Reporter()


def _claim(fd: int, path: bytes, rank: int) -> int | None:
    """The record of this rank of the directory, or the next free one; None if all are taken."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        magic, token, there = HEAD.unpack(os.pread(fd, HEAD.size, 0))
        num_records = int(there)
        for index in range(num_records):
            if _is_of(fd, index, path, rank):
                return index
        if num_records >= NUM_RECORDS or len(path) > BOUNDARIES_AT - PATH_AT:
            return None
        os.pwrite(fd, HEAD.pack(magic, token, num_records + 1), 0)
        return num_records
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _is_of(fd: int, index: int, path: bytes, rank: int) -> bool:
    head = RECORD.unpack(os.pread(fd, RECORD.size, start_of(index)))
    there = os.pread(fd, head[-1], start_of(index) + PATH_AT)
    return head[0] == rank and there == path
