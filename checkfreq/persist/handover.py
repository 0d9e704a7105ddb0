"""Asking a worker that lingers for the memory it holds: the next run's end of the hand-over.

Called by the new trainer, and by ``checkfreq show``. Nothing here waits for long: a socket whose
worker is gone refuses at once, and a worker that is stuck is given up after ``SILENCE_S``. The
other end must run as the same user. What comes is validated (``frames``, ``offer``), and
descriptors that are not handed on are closed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkfreq import faults
from checkfreq.persist import frames as f
from checkfreq.persist import protocol as p
from checkfreq.persist.frames import HandoverError, Purpose, Why
from checkfreq.persist.offer import Body, decode_body
from checkfreq.persist.peers import require_same_user
from checkfreq.store.fileops import Kind, LocalFileOps

logger = logging.getLogger(__name__)

_CONNECT_AGAIN_S = 0.01


@dataclass(frozen=True, slots=True)
class Adopted:
    """A worker that is this process's own from now on, as if it had started it.

    ``channel``: the next message to send is ``protocol.Open``. ``pidfd`` belongs to the caller.
    """

    channel: p.Channel
    pid: int
    pidfd: int


class Offer:
    """What a worker holds. Use it as a context, or `close` it: the worker then lingers on.

    ``slot_fds``: of every slot by its number, writable unless it was only fetched. They are closed
    with the offer, unless it was taken: then they are the caller's.
    """

    def __init__(self, connection: Connection, body: Body, slot_fds: Mapping[int, int]) -> None:
        self.body = body
        self.slot_fds = dict(slot_fds)
        self._connection = connection

    def take(self, *, stderr_fd: int) -> Adopted:
        """Make the worker this process's; its errors go to ``stderr_fd``.

        Raises HandoverError if it is gone or another run was faster; the offer is closed then.
        """
        try:
            faults.reach("handover.take")
            pidfd = os.pidfd_open(os.getpid())
            try:
                self._connection.send(f.Take(), fds=(pidfd, stderr_fd))
            finally:
                os.close(pidfd)
            taken = self._connection.receive(most_fds=1)
            if not isinstance(taken, f.Taken):
                raise HandoverError(f"not taken: {taken}")
            (worker_fd,) = self._connection.take_fds(1)
        except BaseException:
            self.close()
            raise
        faults.reach("handover.taken")
        self.slot_fds = {}
        return Adopted(p.Channel(self._connection.detach()), taken.pid, worker_fd)

    def release(self) -> None:
        """Have the worker give its memory up, and close the offer."""
        with contextlib.suppress(HandoverError):
            self._connection.send(f.Release())
        self.close()

    def close(self) -> None:
        """Close the connection and the descriptors; idempotent."""
        self._connection.close()
        for fd in self.slot_fds.values():
            os.close(fd)
        self.slot_fds = {}

    def __enter__(self) -> Offer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Connection:
    """A connection to the worker that listens on ``path``; every call has a deadline.

    Raises HandoverError if nobody listens there, or another user does.
    """

    def __init__(self, path: Path, *, silence_s: float = f.SILENCE_S) -> None:
        self._silence_s = silence_s
        self._fds: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _connect(self._socket, path, timeout_s=silence_s)
            self._socket.settimeout(silence_s)
            require_same_user(self._socket)
        except BaseException:
            self._socket.close()
            raise

    def send(self, frame: f.Frame, *, fds: tuple[int, ...] = ()) -> None:
        """Send a frame, which fits the buffer of a socket."""
        try:
            socket.send_fds(self._socket, [f.encode(frame)], fds)
        except OSError as error:
            raise HandoverError(f"cannot send {type(frame).__name__}: {error}") from None

    def receive(self, *, most_fds: int) -> f.Frame:
        """The next frame that is not `Wait`, with at most ``most_fds`` descriptors."""
        while isinstance(frame := self._receive(most_fds), f.Wait):
            pass
        return frame

    def take_fds(self, count: int) -> tuple[int, ...]:
        """The descriptors that came, which are the caller's; HandoverError unless ``count`` did."""
        if len(self._fds) != count:
            raise HandoverError(f"expected {count} descriptors, got {len(self._fds)}")
        taken, self._fds = tuple(self._fds), []
        return taken

    def detach(self) -> socket.socket:
        """The socket, without what was not read from it yet: nothing was read ahead."""
        return socket.socket(fileno=self._socket.detach())

    def close(self) -> None:
        """Close it, and descriptors that nobody took; idempotent."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())

    def _receive(self, most_fds: int) -> f.Frame:
        deadline_s = time.monotonic() + self._silence_s
        try:
            head = self._exactly(4, most_fds, deadline_s)
            return f.decode(self._exactly(f.frame_length(head), most_fds, deadline_s))
        except OSError as error:
            raise HandoverError(f"cannot receive: {error}") from None

    def _exactly(self, num_bytes: int, most_fds: int, deadline_s: float) -> bytes:
        data = b""
        while len(data) < num_bytes:
            self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            piece, fds, _, _ = socket.recv_fds(
                self._socket, num_bytes - len(data), most_fds, socket.MSG_CMSG_CLOEXEC
            )
            self._fds.extend(fds)
            if not piece:
                raise HandoverError("the worker closed the connection")
            data += piece
        return data


def _connect(sock: socket.socket, path: Path, *, timeout_s: float) -> None:
    ops = LocalFileOps(path.parent)
    deadline_s = time.monotonic() + timeout_s
    sock.setblocking(False)
    while True:
        try:
            return ops.connect_socket(path, sock)
        except BlockingIOError:  # many connect at once; a stopped worker accepts none of them
            if time.monotonic() > deadline_s:
                raise HandoverError(f"{path}: nobody accepts connections") from None
            time.sleep(_CONNECT_AGAIN_S)
        except OSError as error:  # nobody listens any more, or on another host
            raise HandoverError(str(error)) from None


# ---- what is asked


def ask(directory: Path, rank: int, *, world: int, purpose: Purpose = Purpose.TAKE) -> Offer | None:
    """What the lingering worker of ``rank`` holds; None if there is none that this run can use.

    A worker of another version or number of ranks is released. With ``Purpose.FETCH`` the memory
    can only be read, by any rank of this user on this machine, and no worker is released.
    """
    refused = None
    try:
        faults.reach("handover.ask")
        connection = Connection(f.socket_path(directory, rank))
        try:
            answer = _answer(connection, _hello(purpose, directory, rank, world))
            if isinstance(answer, f.Offered):
                return _offer(connection, answer)
            refused = answer.why if isinstance(answer, f.Refused) else None
            raise HandoverError(str(answer))
        except BaseException:
            connection.close()
            raise
    except (HandoverError, OSError) as error:
        logger.debug("no memory of rank %d in %s: %s", rank, directory, error)
    if purpose is Purpose.TAKE and refused in (Why.VERSION, Why.RANKS):
        release(directory, rank)
    return None


def release(directory: Path, rank: int) -> bool:
    """Have the lingering worker of ``rank``, if there is one, give its memory up.

    True once it does; what it still has to write it writes.
    """
    with contextlib.suppress(HandoverError, OSError), _talk(directory, rank) as connection:
        connection.send(_hello(Purpose.RELEASE, directory, rank, 0))
        try:
            connection.receive(most_fds=0)
        except HandoverError:  # it closes the connection when it has let go
            return True
    return False


def release_all(directory: Path) -> None:
    """Have every worker that lingers in ``directory`` give its memory up."""
    for rank in ranks_in(directory):
        release(directory, rank)


def status(directory: Path, rank: int) -> f.Status | None:
    """What the lingering worker of ``rank`` says of itself; None if there is none."""
    with contextlib.suppress(HandoverError, OSError), _talk(directory, rank) as connection:
        answer = _answer(connection, _hello(Purpose.STATUS, directory, rank, 0))
        return answer if isinstance(answer, f.Status) else None
    return None


def ranks_in(directory: Path) -> list[int]:
    """The ranks whose sockets are in ``directory``, ascending, whether anyone listens or not."""
    try:
        kinds = LocalFileOps(directory).scan(directory)
    except OSError:
        return []
    ranks = [f.rank_of(name) for name, kind in kinds.items() if kind is Kind.OTHER]
    return sorted(rank for rank in ranks if rank is not None)


@contextlib.contextmanager
def _talk(directory: Path, rank: int) -> Iterator[Connection]:
    connection = Connection(f.socket_path(directory, rank))
    try:
        yield connection
    finally:
        connection.close()


def _hello(purpose: Purpose, directory: Path, rank: int, world: int) -> f.Hello:
    identity = LocalFileOps(directory).identity(directory)
    return f.Hello(purpose, f.own_version(), rank, world, identity)


def _answer(connection: Connection, hello: f.Hello) -> f.Frame:
    connection.send(hello)
    return connection.receive(most_fds=f.MOST_SLOTS + 1)


def _offer(connection: Connection, offered: f.Offered) -> Offer:
    """The offer, once its descriptors are what it says; it owns the connection."""
    body_fd, *slot_fds = connection.take_fds(1 + offered.num_slots)
    try:
        body = decode_body(body_fd)
        if len(body.slots) != len(slot_fds):
            raise HandoverError(f"{len(slot_fds)} descriptors for {len(body.slots)} slots")
        for (index, num_bytes), fd in zip(body.slots, slot_fds, strict=True):
            if os.fstat(fd).st_size != num_bytes:  # truncated by a run that died meanwhile
                raise HandoverError(f"slot {index} does not have {num_bytes} bytes")
    except BaseException:
        for fd in slot_fds:
            os.close(fd)
        raise
    finally:
        os.close(body_fd)
    numbers = (index for index, _ in body.slots)
    return Offer(connection, body, dict(zip(numbers, slot_fds, strict=True)))
