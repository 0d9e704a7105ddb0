"""The frames that a lingering worker and the next run exchange.

A worker that outlived its trainer listens on ``.memory-<rank>.sock`` in the checkpoint directory. A
client sends a `Hello`. By its purpose it gets a `Status`, an `Offered` with descriptors, or
`Refused`; `Wait` comes meanwhile. After `Offered` it may send `Take`, with a pidfd of its process
and a descriptor for the worker's errors: `Taken` is the last frame, and the connection becomes a
``protocol.Channel``. `Release` ends the worker. Closing the connection changes nothing.

A frame is a 4-byte length and JSON of at most ``MOST_FRAME_BYTES``. What may be larger, the text
of an offer and its records, lies in sealed memory of which only the descriptor is sent (``offer``):
no end ever waits for the other to read. The two may be of different versions, and anything may
connect, so everything is validated and bounded.
"""

from __future__ import annotations

import enum
import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from checkfreq import __version__
from checkfreq.persist import protocol as p
from checkfreq.store.manifest import digest_of

MOST_FRAME_BYTES = 4096
#: One ``sendmsg`` carries at most 253 descriptors.
MOST_SLOTS = 128
#: The longest time between two frames of a worker that is well.
SILENCE_S = 10.0

_LENGTH = struct.Struct("!I")
_LARGEST = 2**63 - 1
_SOCKET = re.compile(r"\.memory-(0|[1-9][0-9]{0,8})\.sock")


class HandoverError(Exception):
    """The other end said something that it cannot mean, fell silent, or is somebody else."""


class Purpose(enum.Enum):
    """What a client wants."""

    TAKE = "take"  # an offer, and perhaps the worker
    FETCH = "fetch"  # an offer that can only be read
    STATUS = "status"
    RELEASE = "release"


class Why(enum.Enum):
    """Why a client is refused."""

    VERSION = "another version"
    RANKS = "another rank, or another number of ranks"
    DIRECTORY = "another directory"
    TAKEN = "another run took it"
    NOTHING = "nothing is held"


class Stage(enum.Enum):
    """How far a complete snapshot in memory got on its way to the disk.

    DURABLE: the checkpoint, or this rank's part of it, is on disk. IN_FLIGHT: it is being written.
    LOST: writing it failed, and nobody is trying.
    """

    DURABLE = "durable"
    IN_FLIGHT = "in flight"
    LOST = "lost"


# ---- frames


class Hello(NamedTuple):
    """The first frame. ``directory``: device and inode of the checkpoint directory."""

    purpose: Purpose
    version: str
    rank: int
    world: int
    directory: tuple[int, int]


class Take(NamedTuple):
    """Be this client's worker. With it: a pidfd of the client, and a descriptor for stderr."""


class Release(NamedTuple):
    """Give the memory up and end, once nothing is left to write."""


class Wait(NamedTuple):
    """The answer takes longer: digests are being computed."""


class Offered(NamedTuple):
    """With it: the body (`encode_body`), and the ``num_slots`` slots in its order."""

    num_slots: int


class Refused(NamedTuple):
    """There is nothing here for this client."""

    why: Why


class Status(NamedTuple):
    """``step``: the newest snapshot held. ``num_bytes`` of memory in all; kept ``left_s`` more."""

    pid: int
    step: int
    stage: Stage
    num_bytes: int
    left_s: float


class Taken(NamedTuple):
    """With it: a pidfd of the worker. A ``protocol.Channel`` begins."""

    pid: int


Frame = Hello | Take | Release | Wait | Offered | Refused | Status | Taken
_KINDS: dict[str, type[Any]] = {cls.__name__: cls for cls in Frame.__args__}


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LARGEST and math.isfinite(value)  # type: ignore[operator, arg-type]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 200


def _is_identity(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value))


#: Of every field of a frame: what it may be, and how it is rebuilt.
_FIELDS: dict[str, tuple[Callable[[object], bool], Callable[[Any], object]]] = {
    **dict.fromkeys(("rank", "world", "pid", "step", "num_bytes"), (is_count, int)),
    "num_slots": (lambda value: is_count(value) and value <= MOST_SLOTS, int),  # type: ignore[operator]
    "version": (_is_text, str),
    "left_s": (is_time, float),
    "directory": (_is_identity, tuple),
    "purpose": (_is_text, Purpose),
    "why": (_is_text, Why),
    "stage": (_is_text, Stage),
}


def encode(frame: Frame) -> bytes:
    """The bytes of a frame."""
    fields = frame._asdict()
    text = json.dumps([type(frame).__name__, fields], default=lambda one: one.value).encode()
    assert len(text) <= MOST_FRAME_BYTES
    return _LENGTH.pack(len(text)) + text


def decode(text: bytes) -> Frame:
    """The frame with this JSON; HandoverError if there is none."""
    try:
        name, fields = json.loads(text)
        kind = _KINDS[name]
        if fields.keys() != {*kind._fields}:
            raise HandoverError(f"{name} with fields {sorted(fields)!r:.200}")
        frame: Frame = kind(**{field: _field(field, value) for field, value in fields.items()})
    except HandoverError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HandoverError(f"expected a frame, got {text!r:.200} ({error!r:.200})") from None
    return frame


def _field(name: str, value: object) -> object:
    is_sound, rebuilt = _FIELDS[name]
    if not is_sound(value):
        raise HandoverError(f"{name} is {value!r:.200}")
    return rebuilt(value)


def frame_length(head: bytes) -> int:
    """The length of the JSON behind the first 4 bytes; HandoverError if it is out of bounds."""
    (length,) = _LENGTH.unpack(head)
    if not 0 < length <= MOST_FRAME_BYTES:
        raise HandoverError(f"a frame of {length} bytes")
    return int(length)


class FrameReader:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether no byte is left over."""
        return not self._buffer

    def feed(self, data: bytes) -> None:
        """Add bytes as they came."""
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """The next whole frame; None if there is none yet. Raises HandoverError."""
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + frame_length(bytes(self._buffer[: _LENGTH.size]))
        if len(self._buffer) < end:
            return None
        text = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return decode(text)


# ---- who and where


def socket_name(rank: int) -> str:
    """The name of the socket of a rank's worker."""
    return f".memory-{rank}.sock"


def rank_of(name: str) -> int | None:
    """The rank whose socket has this name; None if no socket has."""
    found = _SOCKET.fullmatch(name)
    return None if found is None else int(found[1])


def socket_path(directory: Path, rank: int) -> Path:
    """Where the worker of a rank listens."""
    return directory / socket_name(rank)


def own_version() -> str:
    """Two processes with the same understand each other's ``protocol.Message``."""
    shape = [(cls.__name__, cls.__annotations__) for cls in p.Message.__args__]
    return f"{__version__} {digest_of(repr(shape).encode())}"
