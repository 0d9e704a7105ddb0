"""The messages between trainer and persist worker.

A message is a named tuple (a class that takes a sixth of a dataclass's time to make: every start of
a worker makes them all), sent as a 4-byte length and JSON over a stream socket pair. Slot
memory is passed as a file descriptor with its message. Order is kept in both directions, and the
worker carries requests out in the order in which they arrive. Any thread may send (a lock keeps
the bytes of a message together); one thread receives.

Both ends are the same version of this package, on one machine, so messages are not validated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import select
import socket
import struct
import threading
from typing import Any, NamedTuple

from checkfreq.types import ContentId, FileSpec, Json, Role, TensorSpec

_LENGTH = struct.Struct("!I")
_RECEIVE_BYTES = 1 << 16
_MAX_FDS = 8


class ChannelClosedError(ConnectionError):
    """The other process closed its end or is gone."""


# ---- trainer to worker


class Open(NamedTuple):
    """Lock ``chk_dir`` (waiting at most ``takeover_s``) and make it ready.

    ``role``: a member does not lock it, and changes nothing in it but its own parts.
    ``keep_pending``: keep unfinished checkpoints, because other ranks may be writing parts.
    ``mirror``: where the leader's worker uploads to (``Mirror.to_json``); None: nowhere.
    ``keep_in_memory_s``: how long to keep the snapshots after the trainer's death.
    ``full_copy_every``: how many checkpoints may share a file. ``nice`` and
    ``environment``: of a worker that was another trainer's; None: as it was started. ``umask``: of
    the trainer; None: as it was started.
    ``is_tree``: the ranks' records stay files of their own.
    """

    chk_dir: str
    takeover_s: float
    writer_threads: int
    write_chunk_bytes: int
    max_write_bytes_per_s: int | None
    role: Role = Role()
    keep_pending: bool = False
    mirror: Json = None
    keep_in_memory_s: float = 0.0
    full_copy_every: int = 1
    nice: int | None = None
    environment: dict[str, str] | None = None
    umask: int | None = None
    is_tree: bool = False


class Watch(NamedTuple):
    """Ask these sources when the run ends, from now on; see ``notices.choice.Watched``.

    The only request that does not wait for those before it.
    """

    names: tuple[str, ...]
    deadline_unix_s: float | None
    metadata_url: str | None


class SlotMemory(NamedTuple):
    """Arena slot ``slot`` is ``num_bytes`` of memory: the descriptor sent with this message."""

    slot: int
    num_bytes: int


class SlotLayout(NamedTuple):
    """The layout of a slot from now on. Sent once, so that ``Persist`` stays a small message."""

    slot: int
    files: tuple[FileSpec, ...]


class Persist(NamedTuple):
    """Slot ``slot`` holds a complete snapshot of ``step``: make it a checkpoint.

    ``supersede_after``: with the commit, set aside existing checkpoints of later steps.
    ``own``: with many ranks, the JSON of this rank's own state. ``part_timeout_s``: how long the
    leader waits for the others' parts once its own is durable. ``at_epoch_end``: an epoch ended
    with the step. ``contents``: by name, the files that are not expected to change.
    """

    attempt: str
    step: int
    slot: int
    objects: Json
    world: int
    versions: dict[str, str]
    metrics: dict[str, float]
    supersede_after: int | None = None
    keep: bool = False
    own: Json = None
    part_timeout_s: float = 60.0
    at_epoch_end: bool = False
    contents: dict[str, ContentId] | None = None


class AddMark(NamedTuple):
    """Pin a committed step, add metrics to it, or record whether the run, or an epoch, ended with
    it."""

    step: int
    keep: bool
    metrics: dict[str, float]
    finished: bool | None = None
    at_epoch_end: bool = False


class Prune(NamedTuple):
    """Remove these steps; the store refuses to remove the last valid one."""

    steps: tuple[int, ...]


class Quarantine(NamedTuple):
    """Set a damaged step aside."""

    step: int
    reason: str


class Confirm(NamedTuple):
    """``step`` is committed in every directory of the run: record that there was such a step."""

    step: int


class TellFailure(NamedTuple):
    """From a member: there will be no part of ``step``, for the reason ``why``.

    Its snapshot failed before a worker had it, or two workers died with it. The leader's worker,
    which waits for the part, gives up at once.
    """

    step: int
    attempt: str
    why: str


class PruneMirror(NamedTuple):
    """Remove these steps from the mirror once it has step ``once``, or a later one. Not answered.

    The newest there always stays.
    """

    steps: tuple[int, ...]
    once: int


class KeepNothing(NamedTuple):
    """The trainer ends by itself, without `Close`: nobody will want what is in memory."""


class Close(NamedTuple):
    """Finish all earlier requests, release the lock, exit.

    ``upload_for_s``: how long to go on uploading the newest checkpoint; None: as the mirror says.
    """

    upload_for_s: float | None = None


# ---- worker to trainer


class Waiting(NamedTuple):
    """``holder`` has the lock; the worker keeps trying until ``takeover_s`` is over."""

    holder: str


class Opened(NamedTuple):
    """The lock is held and the directory is ready."""

    pid: int


class OpenFailed(NamedTuple):
    """The directory could not be locked or made ready. ``is_busy``: another run keeps its lock."""

    message: str
    child_traceback: str
    is_busy: bool = False


class Committed(NamedTuple):
    """The checkpoint is durable. ``direct``: written with direct I/O.

    ``persist_s``: seconds from the request to the commit. ``ended_s``: the worker's
    ``time.perf_counter()`` at the commit; on Linux that is CLOCK_MONOTONIC, which all processes
    of a machine share. ``warning``: what went wrong after the commit, "" for nothing.
    ``is_part``: only this member's part is durable; the leader commits the checkpoint. Of a
    checkpoint: ``created_unix_s`` and ``total_bytes`` as its record has them, of all ranks, and
    ``free_bytes``, what the disk has left (None if it did not say). ``linked_bytes``: of
    ``num_bytes``, those in files that the checkpoint before has as well; they were not written.
    """

    attempt: str
    step: int
    num_bytes: int
    write_s: float
    persist_s: float
    ended_s: float
    direct: bool
    kept_existing: bool
    warning: str = ""
    is_part: bool = False
    created_unix_s: float = 0.0
    total_bytes: int = 0
    free_bytes: int | None = None
    linked_bytes: int = 0


class Failed(NamedTuple):
    """The attempt did not become a checkpoint; its slot is free again.

    ``missing_bytes``: room that the disk lacked for it, 0 if that was not the reason.
    """

    attempt: str
    step: int
    phase: str
    message: str
    child_traceback: str
    missing_bytes: int = 0


class Done(NamedTuple):
    """Maintenance was carried out (``steps`` concerned)."""

    request: str
    steps: tuple[int, ...]


class Retaken(NamedTuple):
    """The directory was removed, replaced or unlocked, and is locked again; it has ``steps``."""

    message: str
    steps: tuple[int, ...]


class Trouble(NamedTuple):
    """Maintenance failed; no checkpoint is lost by that."""

    request: str
    message: str
    child_traceback: str


class NoticeSeen(NamedTuple):
    """``source`` says that the run ends, and ``why``. May come at any time, even before ``Opened``.

    ``at_unix_s`` is the time of the world; ``at_s`` the same on ``time.perf_counter``, as of the
    moment at which the source said so. Both None: it may end, nobody knows when.
    """

    source: str
    why: str
    at_unix_s: float | None
    at_s: float | None


class NoticeGone(NamedTuple):
    """``source`` has no notice, or has taken it back."""

    source: str


class NoticeUnanswered(NamedTuple):
    """``source`` has been asked several times and does not answer, for the reason ``why``."""

    source: str
    why: str


class Mirrored(NamedTuple):
    """The mirror's state has changed: a ``MirrorReport`` as JSON."""

    report: Json


Message = (
    Open
    | Watch
    | SlotMemory
    | SlotLayout
    | Persist
    | AddMark
    | Prune
    | Quarantine
    | Confirm
    | TellFailure
    | PruneMirror
    | KeepNothing
    | Close
    | Waiting
    | Opened
    | OpenFailed
    | Committed
    | Failed
    | Done
    | Retaken
    | Trouble
    | NoticeSeen
    | NoticeGone
    | NoticeUnanswered
    | Mirrored
)
#: Requests that change the directory without committing a checkpoint.
Maintenance = Prune | AddMark | Quarantine | Confirm | TellFailure
#: What the worker's watch thread says; no request asked for it.
Notice = NoticeSeen | NoticeGone | NoticeUnanswered
_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in Message.__args__}


def encode(message: Message) -> bytes:
    """Return the frame of a message: its length, then its JSON."""
    text = json.dumps([type(message).__name__, message._asdict()], default=_values_of).encode()
    return _LENGTH.pack(len(text)) + text


def _values_of(value: Any) -> list[object]:
    """What ``dataclasses.astuple`` returns, a level at a time: it would copy every value below.

    A layout is encoded in the training thread, and has a row for each tensor.
    """
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


def decode(text: bytes) -> Message:
    """Rebuild a message from its JSON."""
    name, body = json.loads(text)
    if name == "SlotLayout":
        body["files"] = tuple(_file_spec(values) for values in body["files"])
    if name == "Open":
        rank, world, group, split = body["role"]
        body.update(role=Role(rank, world, tuple(group), split))
    if name == "Persist" and (contents := body["contents"]):
        body["contents"] = {file: tuple(content) for file, content in contents.items()}
    if name == "Watch":
        body["names"] = tuple(body["names"])
    if "steps" in body:
        body["steps"] = tuple(body["steps"])
    message: Message = _TYPES[name](**body)
    return message


def _file_spec(values: list[Any]) -> FileSpec:
    name, slot_offset, num_bytes, header_bytes, tensors = values
    specs = tuple(_tensor_spec(*tensor) for tensor in tensors)
    return FileSpec(name, slot_offset, num_bytes, header_bytes, specs)


def _tensor_spec(name: str, dtype: str, shape: list[int], *rest: int) -> TensorSpec:
    return TensorSpec(name, dtype, tuple(shape), *rest)


def readable(*sources: socket.socket | int, timeout_s: float) -> list[int]:
    """Return the descriptors that have input (or have ended) within ``timeout_s``.

    ``poll`` rather than ``select``: a training process may hold more than 1024 descriptors.
    """
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    return [fd for fd, _ in poll.poll(math.ceil(timeout_s * 1000))]


class Channel:
    """One end of the socket pair."""

    def __init__(self, sock: socket.socket, *, send_timeout_s: float = 60.0) -> None:
        # For sends. Receives poll first, with a timeout of their own.
        sock.settimeout(send_timeout_s)
        self._socket = sock
        self._input = select.poll()
        self._input.register(sock, select.POLLIN)
        self._send_lock = threading.Lock()
        self._buffer = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        """Descriptor to poll for input."""
        return self._socket.fileno()

    def send(self, message: Message, *, fd: int | None = None) -> None:
        """Send one message, with the descriptor ``fd`` if given.

        Raises ChannelClosedError if the other process is gone, or reads nothing for
        ``send_timeout_s``.
        """
        frame = encode(message)
        with self._send_lock:
            try:
                if fd is not None:
                    # May send only part of the frame; the rest must not carry the descriptor again.
                    sent = socket.send_fds(self._socket, [frame], [fd])
                    frame = frame[sent:]
                self._socket.sendall(frame)
            except OSError as error:
                raise ChannelClosedError(
                    f"cannot send {type(message).__name__}: {error}"
                ) from error

    def receive(self, *, timeout_s: float) -> Message | None:
        """Return the next message; None if none is complete within ``timeout_s``.

        Raises ChannelClosedError once the other process is gone and everything it sent was
        returned.
        """
        while True:
            message = self._next_frame()
            if message is not None:
                return message
            if self._socket.fileno() < 0:
                raise ChannelClosedError("this end was closed")
            if not self._input.poll(math.ceil(timeout_s * 1000)):
                return None
            self._fill()

    def take_fd(self) -> int:
        """Return the oldest received descriptor not taken yet; the caller must close it."""
        return self._fds.pop(0)

    def close(self) -> None:
        """Close this end; idempotent."""
        self._socket.close()

    def _fill(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, _MAX_FDS)
        except OSError as error:
            raise ChannelClosedError(f"cannot receive: {error}") from error
        self._fds.extend(fds)
        if not data:
            raise ChannelClosedError("the other process closed the channel")
        self._buffer += data

    def _next_frame(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        text = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return decode(text)
