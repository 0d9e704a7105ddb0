"""Reads that the ranks of one machine share: one reads a piece, and hands it to the others.

In a *round* the members agree on the files that all of them read in the same pieces. Piece ``n``
of these is read by member ``n % members`` into a buffer of its own, and copied into slot ``n %
slots`` of a `SharedRing`. The others copy it into buffers of their own, and digest it there: what a
member has checked can no longer change, and nobody relies on another's check.

A socket between each two members says what is in a slot, and that it was taken. The kernel's locks
in ``send`` and ``recv`` order what was done to the memory before the one and after the other, on
any processor; a flag in shared memory, set from Python, would not. A slot is always filled by the
same member, once all others have said that they took what was there.

Sharing is never needed. Whoever cannot go on leaves by closing its sockets; if nothing comes for
``patience_s``, somebody hangs. Then all leave, and each reads the rest for itself. No torch.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from xxhash import xxh3_64_intdigest

from checkfreq import faults
from checkfreq.restore.shared_ring import SharedRing

logger = logging.getLogger(__name__)

Range = tuple[int, int]

_HEAD = struct.Struct("!BQQ")
_DIGEST = struct.Struct("!Q")
#: Most files that a member offers to share: a message must fit into a socket's buffer.
_MOST_FILES = 4096
_LARGEST = _HEAD.size + _MOST_FILES * _DIGEST.size
#: Rounds are numbered through all stages, from a multiple of this in each.
_ROUNDS_OF_A_STAGE = 1 << 16
#: How often whoever waits looks whether it should be less patient.
_LOOK_EVERY_S = 1.0


class _Kind(enum.IntEnum):
    """What a message says, and its two numbers."""

    FILES = 1  # round, 0; behind it a digest of each file that is read, with its pieces
    READY = 2  # round, piece: it is in its slot
    TAKEN = 3  # round, piece: the sender is done with the slot
    DONE = 4  # round, 0: the sender comes to no round up to this one any more


class SharedReads:
    """One member's side; all members pass the same stages, in the same order.

    ``peers``: a connected SEQPACKET socket to each other member, by its number. ``patience_s``: how
    long to wait for others. Stages and rounds are for one thread; `fill` is for all that read.
    """

    def __init__(
        self,
        ring: SharedRing,
        *,
        member: int,
        peers: Mapping[int, socket.socket],
        patience_s: Callable[[], float],
    ) -> None:
        self._ring = ring
        self._member = member
        self._num_members = len(peers) + 1
        self._peers = dict(peers)
        self._patience_s = patience_s
        self._round = 0
        self._is_in_stage = False
        self._changed = threading.Condition()  # for all below
        self._is_over = False
        self._files: dict[tuple[int, int], frozenset[int]] = {}  # by round and member
        self._done = dict.fromkeys(peers, 0)
        self._ready: set[int] = set()
        self._taken: Counter[int] = Counter()
        for one in self._peers.values():
            one.setblocking(False)
        self._listener = threading.Thread(
            target=self._listen, name="checkfreq-shared-reads", daemon=True
        )
        self._listener.start()

    # ---- stages and rounds

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """Reads in the block may be shared; if it raises, this member leaves."""
        last = (self._round // _ROUNDS_OF_A_STAGE + 1) * _ROUNDS_OF_A_STAGE - 1
        self._is_in_stage = True
        try:
            yield
        except BaseException as error:
            self.leave(f"{type(error).__name__} on this rank")
            raise
        finally:
            self._is_in_stage = False
            self._round = last + 1
        self._say_all(_Kind.DONE, last, 0)

    def agree(self, files: Mapping[str, Sequence[Range]]) -> dict[tuple[str, int], int]:
        """Begin a round: the numbers of the pieces that are shared, by file and beginning.

        ``files``: the pieces of each that this member reads. The round before must be over here.
        """
        if not self._is_in_stage or self._is_over:
            return {}
        with self._changed:  # before anybody can hear that this member is in the round
            self._round += 1
            self._ready.clear()
            self._taken.clear()
        digests = {name: _digest(name, ranges) for name, ranges in sorted(files.items())}
        offered = [*digests.values()][:_MOST_FILES]
        self._say_all(_Kind.FILES, self._round, 0, b"".join(map(_DIGEST.pack, offered)))
        if not self._wait(self._have_all_come):
            return {}
        common = frozenset(offered).intersection(*map(self._files_of, self._peers))
        pieces = [
            (name, start)
            for name, digest in digests.items()
            if digest in common
            for start, _ in files[name]
        ]
        return {piece: number for number, piece in enumerate(pieces)}

    def place(self, number: int) -> int:
        """Where a piece comes among those that this member goes through: its own come early.

        By half of the ring: so reads are ahead of what others wait for, and as many are under way
        as without sharing. By less than the ring: so the first piece that not all have is always
        one that its reader has come to, and for which there is room.
        """
        return number - self._ring.num_slots // 2 * self._is_own(number)

    def fill(self, number: int, data: memoryview, read: Callable[[], None]) -> None:
        """Fill ``data`` with a piece: by ``read``, or with what another member has read."""
        if self._is_own(number):
            read()
            self._hand_on(number, data)
        elif not self._take(number, data):
            read()

    def leave(self, why: str) -> None:
        """Share nothing from now on. Idempotent; any thread."""
        with self._changed:
            if self._is_over:
                return
            self._is_over = True
            self._changed.notify_all()
        logger.debug("ranks of this machine share no more reads: %s", why)
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave, and release the sockets; not while something is read."""
        self.leave("the end")
        self._listener.join()
        for peer in self._peers.values():
            peer.close()

    # ---- pieces

    def _is_own(self, number: int) -> bool:
        return number % self._num_members == self._member

    def _hand_on(self, number: int, data: memoryview) -> None:
        before = number - self._ring.num_slots
        others = self._num_members - 1
        if not self._wait(lambda: before < 0 or self._taken[before] == others):
            return
        faults.reach("restore.hand_on")
        self._ring.put(number, data)
        self._say_all(_Kind.READY, self._round, number)

    def _take(self, number: int, data: memoryview) -> bool:
        """False if it does not come any more."""
        if not self._wait(lambda: number in self._ready):
            return False
        faults.reach("restore.take")
        self._ring.get(number, data)
        reader = self._peers[number % self._num_members]
        self._say(reader, _Kind.TAKEN, self._round, number)
        return True

    def _have_all_come(self) -> bool:
        here = self._round
        return all((here, peer) in self._files or self._done[peer] >= here for peer in self._peers)

    def _files_of(self, peer: int) -> frozenset[int]:
        """What a member offers in this round; nothing if it does not come to it."""
        return self._files.pop((self._round, peer), frozenset())

    def _wait(self, is_so: Callable[[], bool]) -> bool:
        """Wait until it is so; False once the sharing is over."""
        since_s = time.monotonic()
        with self._changed:
            while not is_so():
                left_s = since_s + self._patience_s() - time.monotonic()
                if self._is_over or left_s <= 0:
                    break
                self._changed.wait(min(left_s, _LOOK_EVERY_S))
            else:
                return True
        self.leave(f"nothing came for {time.monotonic() - since_s:.0f} s")
        return False

    # ---- messages

    def _say_all(self, kind: _Kind, of: int, number: int, rest: bytes = b"") -> None:
        for peer in self._peers.values():
            self._say(peer, kind, of, number, rest)

    def _say(
        self, peer: socket.socket, kind: _Kind, of: int, number: int, rest: bytes = b""
    ) -> None:
        if self._is_over:
            return
        try:
            # All that may be unread, two messages for each slot, has room in a socket's buffer.
            peer.send(_HEAD.pack(kind, of, number) + rest)
        except OSError as error:  # it is gone, or does not listen
            self.leave(str(error))

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, number)
            while not self._is_over:
                for key, _ in selector.select():
                    self._hear(key.data)

    def _hear(self, peer: int) -> None:
        try:
            message = self._peers[peer].recv(_LARGEST)
            kind, of, number = _HEAD.unpack_from(message)
        except OSError as error:
            self.leave(str(error))
        except struct.error:  # the end of the connection
            self.leave(f"member {peer} has left")
        else:
            with self._changed:
                self._note(peer, kind, of, number, message[_HEAD.size :])
                self._changed.notify_all()

    def _note(self, peer: int, kind: int, of: int, number: int, rest: bytes) -> None:
        if kind == _Kind.FILES:
            self._files[of, peer] = frozenset(one for (one,) in _DIGEST.iter_unpack(rest))
        elif kind == _Kind.DONE:
            self._done[peer] = of
        elif of != self._round:  # taken in a round that is over here
            return
        elif kind == _Kind.READY:
            self._ready.add(number)
        else:
            self._taken[number] += 1


def _digest(name: str, ranges: Sequence[Range]) -> int:
    """Stands for a file, and how it is read."""
    return xxh3_64_intdigest(repr((name, ranges)).encode())
