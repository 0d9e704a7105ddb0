"""A worker without a trainer, and with memory: it keeps the snapshots until somebody wants them.

One loop on the main thread: it answers clients (``frames``), and looks once a second whether there
is still a reason to stay. It ends when a new trainer takes the worker, when a client says so, when
the time is over, when memory is short, when the directory or the socket is not the one it began
with, and on SIGTERM once nothing is left to write. The request thread may still be writing: the
memory is kept for that in any case. No client can hold the loop up: what it sends is read as it
comes, and an answer fits the buffer of a socket.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from checkfreq import faults
from checkfreq.persist import frames as f
from checkfreq.persist.frames import HandoverError, Purpose, Stage, Why
from checkfreq.persist.offer import encode_body
from checkfreq.persist.peers import peer_of, require_pidfd_of, require_same_user
from checkfreq.persist.pressure import MemoryPressure
from checkfreq.persist.slots import Slots
from checkfreq.store.fileops import LocalFileOps, read_only
from checkfreq.types import Role

#: How often to look at what no descriptor announces.
_LOOK_S = 1.0
#: A client says what it wants within this time.
_GREETING_S = 10.0
#: How much longer a client may think about an offer when the time is over.
_OFFER_GRACE_S = 120.0
_MOST_CLIENTS = 128
_RECEIVE_BYTES = 4096
#: A client sends two; the kernel closes what is more.
_MOST_FDS = 2
_NUM_TAKEN = 2


class Ending(enum.Enum):
    """Why the memory is given up."""

    TIME = "its time is over"
    RELEASED = "another run asked for it"
    PRESSURE = "memory is short"
    DIRECTORY = "the directory was moved, removed or replaced"
    SOCKET = "its socket was removed or replaced"
    SIGNAL = "SIGTERM"


@dataclass(frozen=True, slots=True)
class Successor:
    """The trainer that takes the worker. ``in_flight``: attempts that it was told are that."""

    sock: socket.socket
    pid: int
    pidfd: int
    stderr_fd: int
    in_flight: frozenset[str]


@dataclass(eq=False, slots=True)
class _Client:
    sock: socket.socket
    greet_by_s: float
    reader: f.FrameReader = field(default_factory=f.FrameReader)
    fds: list[int] = field(default_factory=list)
    purpose: Purpose | None = None
    #: After the offer.
    in_flight: frozenset[str] | None = None

    def send(self, frame: f.Frame, fds: list[int]) -> None:
        """The first frames to a client that reads; one that does not is dropped."""
        data = f.encode(frame)
        if socket.send_fds(self.sock, [data], fds) != len(data):
            raise HandoverError("the client reads nothing")

    def close(self) -> None:
        self.sock.close()
        while self.fds:
            os.close(self.fds.pop())


class Lingering:
    """One time of waiting for a successor.

    ``until_s`` is a time of ``clock``. ``wake_fd`` has input when `look` should be called, with
    SIGTERM's number among it if that came. ``look`` is called on the loop's thread.
    """

    def __init__(
        self,
        directory: Path,
        slots: Slots,
        role: Role,
        *,
        until_s: float,
        pressure: MemoryPressure,
        wake_fd: int,
        look: Callable[[bytes], Ending | None] = lambda woken: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._path = f.socket_path(directory, role.rank)
        self._ops = LocalFileOps(directory)
        self._slots = slots
        self._role = role
        self._until_s = until_s
        self._pressure = pressure
        self._wake_fd = wake_fd
        self._look = look
        self._clock = clock
        self._clients: dict[int, _Client] = {}
        self._poll = select.poll()
        self._listener: socket.socket | None = None
        self._describing: threading.Thread | None = None

    def listen(self) -> bool:
        """Make the socket; False where that is not possible, so that there is nothing to stay for.

        Replaces what a worker that was killed left, and that of an earlier one, which then ends.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            faults.reach("linger.listen")
            self._identity = self._ops.identity(self._directory)
            self._ops.bind_socket(self._path, listener)
            listener.listen(_MOST_CLIENTS)
            listener.setblocking(False)
            self._socket_identity = self._ops.identity(self._path)
        except OSError:  # a file system without sockets, or no directory
            listener.close()
            return False
        self._listener = listener
        for fd in (listener.fileno(), self._wake_fd):
            self._poll.register(fd, select.POLLIN)
        for fd in self._pressure.filenos():
            self._poll.register(fd, select.POLLPRI)
        return True

    def run(self) -> Successor | Ending:
        """Serve clients until one takes the worker, or there is a reason to end."""
        try:
            while True:
                for fd, _ in self._poll.poll(_LOOK_S * 1000):
                    if (end := self._on_input(fd)) is not None:
                        return end
                if (end := self._reason_to_end()) is not None:
                    return end
                self._tend_clients()
        finally:
            self._close()

    # ---- reasons

    def _on_input(self, fd: int) -> Successor | Ending | None:
        assert self._listener is not None
        if fd == self._listener.fileno():
            self._accept(self._listener)
        elif fd == self._wake_fd:
            return self._look(os.read(fd, _RECEIVE_BYTES))
        elif fd in self._clients:
            return self._hear(self._clients[fd])
        elif fd in self._pressure.filenos():
            return Ending.PRESSURE
        return None

    def _reason_to_end(self) -> Ending | None:
        try:
            if self._ops.identity(self._directory) != self._identity:
                return Ending.DIRECTORY
        except OSError:
            return Ending.DIRECTORY
        if not self._has_socket():
            return Ending.SOCKET
        thinks = any(
            client.in_flight is not None and client.purpose is Purpose.TAKE
            for client in self._clients.values()
        )
        if self._clock() >= self._until_s + (_OFFER_GRACE_S if thinks else 0.0):
            return Ending.TIME
        return Ending.PRESSURE if self._pressure.is_short() else None

    def _has_socket(self) -> bool:
        try:
            return self._ops.identity(self._path) == self._socket_identity
        except OSError:
            return False

    # ---- clients

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            sock.setblocking(False)
            client = _Client(sock, self._clock() + _GREETING_S)
            try:
                require_same_user(sock)
                if len(self._clients) >= _MOST_CLIENTS:
                    raise HandoverError("too many clients")
            except (HandoverError, OSError):
                client.close()
                return
            self._clients[sock.fileno()] = client
            self._poll.register(sock, select.POLLIN)

    def _hear(self, client: _Client) -> Successor | Ending | None:
        try:
            data, fds, _, _ = socket.recv_fds(
                client.sock, _RECEIVE_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC
            )
            client.fds.extend(fds)
            if not data or len(client.fds) > _NUM_TAKEN:
                raise HandoverError("it left, or sends descriptors that nobody asked for")
            client.reader.feed(data)
            while (frame := client.reader.next_frame()) is not None:
                if (end := self._answer(client, frame)) is not None:
                    return end
        except (HandoverError, OSError):
            self._drop(client)
        return None

    def _answer(self, client: _Client, frame: f.Frame) -> Successor | Ending | None:
        match frame:
            case f.Hello() if client.purpose is None and not client.fds:
                return self._greet(client, frame)
            case f.Release() if client.in_flight is not None:
                return Ending.RELEASED
            case f.Take() if client.in_flight is not None and client.purpose is Purpose.TAKE:
                return self._hand_over(client, client.in_flight)
        raise HandoverError(f"out of turn: {frame}")

    def _greet(self, client: _Client, hello: f.Hello) -> Ending | None:
        client.purpose = hello.purpose
        if (why := self._refusal(hello)) is not None:
            client.send(f.Refused(why), [])
            self._drop(client)
        elif hello.purpose is Purpose.RELEASE:
            return Ending.RELEASED
        elif hello.purpose is Purpose.STATUS:
            client.send(self._status(), [])
            self._drop(client)
        elif self._slots.are_described():
            self._offer(client)
        else:
            client.send(f.Wait(), [])
            self._describe()
        return None

    def _refusal(self, hello: f.Hello) -> Why | None:
        if hello.directory != self._identity:
            return Why.DIRECTORY
        if hello.purpose is Purpose.RELEASE:
            return None
        if self._slots.newest() is None:
            return Why.NOTHING
        if hello.purpose is Purpose.STATUS:
            return None
        if hello.version != f.own_version():
            return Why.VERSION
        is_same = (hello.rank, hello.world) == (self._role.rank, self._role.world)
        return None if is_same else Why.RANKS

    def _status(self) -> f.Status:
        newest = self._slots.newest() or (0, Stage.LOST)
        left_s = max(0.0, self._until_s - self._clock())
        return f.Status(os.getpid(), *newest, self._slots.num_bytes, left_s)

    def _describe(self) -> None:
        """Compute digests in a thread: the loop goes on."""
        if self._describing is None or not self._describing.is_alive():
            self._describing = threading.Thread(
                target=self._slots.describe, args=(self._role,), daemon=True
            )
            self._describing.start()

    def _offer(self, client: _Client) -> None:
        faults.reach("linger.offer")
        body, slot_fds = self._slots.offer(self._role)
        client.in_flight = frozenset(
            one.attempt for one in body.snapshots if one.stage is Stage.IN_FLIGHT
        )
        fds = [encode_body(body)]
        try:
            if len(slot_fds) > f.MOST_SLOTS:
                raise HandoverError("too many slots")
            if client.purpose is Purpose.FETCH:
                fds.extend(map(read_only, slot_fds))
                slot_fds = fds[1:]
            client.send(f.Offered(len(slot_fds)), [fds[0], *slot_fds])
        finally:
            for fd in fds:
                os.close(fd)

    def _hand_over(self, client: _Client, in_flight: frozenset[str]) -> Successor:
        if len(client.fds) != _NUM_TAKEN or not client.reader.is_empty:
            raise HandoverError(f"{len(client.fds)} descriptors with Take")
        require_pidfd_of(client.fds[0], client.sock)
        faults.reach("linger.take")
        pid, _ = peer_of(client.sock)
        self._forget_socket()  # from here on nobody else can connect
        own = os.pidfd_open(os.getpid())
        # If it is dead by now, its channel will say so, and the worker lingers again.
        with contextlib.suppress(OSError):
            client.send(f.Taken(os.getpid()), [own])
        os.close(own)
        faults.reach("linger.adopted")
        del self._clients[client.sock.fileno()]
        pidfd, stderr_fd = client.fds
        return Successor(client.sock, pid, pidfd, stderr_fd, in_flight)

    def _tend_clients(self) -> None:
        is_described = self._slots.are_described()
        for client in list(self._clients.values()):
            try:
                if client.purpose is None and self._clock() > client.greet_by_s:
                    raise HandoverError("it says nothing")
                if client.purpose is not None and client.in_flight is None:
                    if is_described:
                        self._offer(client)
                    else:
                        client.send(f.Wait(), [])
                        self._describe()  # a snapshot may have come to need it meanwhile
            except (HandoverError, OSError):
                self._drop(client)

    def _drop(self, client: _Client) -> None:
        fd = client.sock.fileno()
        if self._clients.pop(fd, None) is not None:
            self._poll.unregister(fd)
        client.close()

    # ---- the end

    def _forget_socket(self) -> None:
        if self._listener is None:
            return
        if self._has_socket():
            with contextlib.suppress(OSError):
                self._ops.unlink(self._path)
        self._listener.close()

    def _close(self) -> None:
        self._forget_socket()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._pressure.close()
