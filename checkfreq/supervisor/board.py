"""Shared memory in which managers say where training stands, for the supervisor to read.

Each start of the script gets a board of its own: an anonymous file of the supervisor, whose path in
``/proc`` and whose token are in the environment variable `VARIABLE`. No message is waited for on
either side, nothing is left behind in a file system, and a loader worker that inherits the mapping
holds nobody up. Whoever finds the variable on another machine, in another container or under
another user does not find the token there, and tells nothing.

Memory: a head (magic, token, number of records), then records of `RECORD_BYTES`, each of one rank
of one directory. A record is a head, the directory's path, and the latest boundaries: the step and
the time of each, the step's remainder saying where. All numbers are those of this machine.
"""

from __future__ import annotations

import enum
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "CHECKFREQ_RUN"
MAGIC = b"cfrun-01"
TOKEN_BYTES = 16
#: A multiple of every page size, so that a record can be mapped alone.
RECORD_BYTES = 128 << 10
NUM_RECORDS = 128
NUM_BOUNDARIES = 4096

HEAD = struct.Struct(f"<8s{TOKEN_BYTES}sq")
#: Rank, process, state, step restored (`ANEW`: none), bytes of the path.
RECORD = struct.Struct("<qqqqq")
PATH_AT = 64
BOUNDARIES_AT = RECORD_BYTES // 2
#: The step, and when it was reached, by ``time.monotonic``.
BOUNDARY = struct.Struct("<qd")
ANEW = -1
BOARD_BYTES = RECORD_BYTES * (1 + NUM_RECORDS)


class State(enum.IntEnum):
    """How far a manager has got."""

    MADE = 0
    TRAINING = 1
    CLOSED = 2
    FAILED = 3
    STOPPED = 4
    FINISHED = 5
    #: It could not restore, since a disk or a server did not answer.
    CUT_OFF = 6


@dataclass(frozen=True, slots=True)
class Record:
    """What one manager told. ``boundaries``: the time of each of the latest steps, ascending.

    The first boundary is where training began: the step that was restored, or 0.
    """

    chk_dir: str
    rank: int
    pid: int
    state: State
    restored_step: int | None
    boundaries: Mapping[int, float]

    @property
    def has_begun(self) -> bool:
        """Whether it is known from which step training goes on."""
        return bool(self.boundaries)

    @property
    def step(self) -> int:
        """The latest step that was reached."""
        return max(self.boundaries, key=self.boundaries.__getitem__, default=0)

    def seconds_since(self, step: int) -> float | None:
        """How long training took from ``step`` to the latest; None if that is not known."""
        if step not in self.boundaries:
            return None
        return max(0.0, self.boundaries[self.step] - self.boundaries[step])


class Board:
    """The supervisor's side: made before the script starts, read at any time."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("checkfreq-run", os.MFD_CLOEXEC)
        os.truncate(self._fd, BOARD_BYTES)
        self._map = mmap.mmap(self._fd, BOARD_BYTES)
        token = os.urandom(TOKEN_BYTES)
        HEAD.pack_into(self._map, 0, MAGIC, token, 0)
        self.address = f"/proc/{os.getpid()}/fd/{self._fd}:{token.hex()}"

    def records(self) -> list[Record]:
        """What was told so far; a record that makes no sense is left out."""
        _, _, num_records = HEAD.unpack_from(self._map)
        found = (self._record(index) for index in range(min(num_records, NUM_RECORDS)))
        return [record for record in found if record is not None]

    def checksum(self) -> int:
        """Another number each time that a manager has told something."""
        _, _, num_records = HEAD.unpack_from(self._map)
        with memoryview(self._map) as memory:
            return zlib.crc32(memory[: start_of(min(num_records, NUM_RECORDS))])

    def close(self) -> None:
        """Free the memory, once nobody else maps it; idempotent."""
        if not self._map.closed:
            self._map.close()
            os.close(self._fd)

    def _record(self, index: int) -> Record | None:
        base = start_of(index)
        rank, pid, state, restored, path_bytes = RECORD.unpack_from(self._map, base)
        if not 0 < path_bytes <= BOUNDARIES_AT - PATH_AT or state not in set(State):
            return None
        path = self._map[base + PATH_AT : base + PATH_AT + path_bytes]
        boundaries = BOUNDARY.iter_unpack(
            self._map[base + BOUNDARIES_AT : base + BOUNDARIES_AT + BOUNDARY.size * NUM_BOUNDARIES]
        )
        return Record(
            os.fsdecode(path),
            rank,
            pid,
            State(state),
            None if restored == ANEW else restored,
            dict(sorted((step, at_s) for step, at_s in boundaries if at_s > 0.0)),
        )


def start_of(index: int) -> int:
    """Where a record begins."""
    return RECORD_BYTES * (1 + index)


def open_board(address: str) -> int | None:
    """A descriptor of the board at an address; None if there is no such board."""
    path, _, token = address.rpartition(":")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        head = os.pread(fd, HEAD.size, 0)
    except OSError:
        head = b""
    if len(head) == HEAD.size and HEAD.unpack(head)[:2] == (MAGIC, _bytes_of(token)):
        return fd
    os.close(fd)
    return None


def _bytes_of(token: str) -> bytes:
    try:
        return bytes.fromhex(token)
    except ValueError:
        return b""
