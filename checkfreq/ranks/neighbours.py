"""Which ranks restore the same step on the same machine, and the connections between them.

Ranks are neighbours if they run as the same user of the same kernel and network namespace, and see
the same directory. Each listens at an abstract address, which needs no file, and connects to those
behind it; the first brings the memory of the `SharedRing`. Then all ranks meet: neighbours share
reads only if every one of them is connected to all others, so that none waits for one that
cannot. Whatever does not work is logged at DEBUG, and each rank reads for itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from checkfreq.persist.frames import HandoverError
from checkfreq.persist.peers import require_same_user
from checkfreq.ranks.meetings import Meetings
from checkfreq.ranks.merging import grouped, who
from checkfreq.ranks.rank_sets import RankSet, members
from checkfreq.restore.shared_reads import SharedReads
from checkfreq.restore.shared_ring import SharedRing, slots_for
from checkfreq.store.fileops import LocalFileOps
from checkfreq.store.manifest import FileEntry
from checkfreq.store.source import CheckpointSource
from checkfreq.types import Json

logger = logging.getLogger(__name__)

#: Where a rank reads less, connecting took longer than sharing saved, on a local disk and two busy
#: cores (measured 2026-11).
SMALLEST_BYTES = 128 << 20

#: Of what ranks wait for one another in a meeting: so long one waits for what another reads. Then
#: it reads the rest for itself, and it is the next meeting that names who hangs.
_PATIENCE = 0.25
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_GREETING = struct.Struct("!I")
_BACKLOG = 128


@contextlib.contextmanager
def shared_reads(
    meetings: Meetings, source: CheckpointSource, step: int, files: Sequence[FileEntry]
) -> Iterator[SharedReads | None]:
    """The reads of a step's ``files`` that this rank shares with its neighbours, if it has any.

    All ranks come here together, each with the files that it needs. Raises what meetings raise.
    """
    if not source.is_local or source.is_memory:
        yield None
        return
    own = _Neighbour(meetings, source, step)
    with contextlib.ExitStack() as stack:
        stack.callback(own.close)
        shared = own.connected(sum(file.num_bytes for file in files))
        if shared is not None:
            stack.callback(shared.close)
        yield shared


class _Neighbour:
    """One rank, while neighbours find one another."""

    def __init__(self, meetings: Meetings, source: CheckpointSource, step: int) -> None:
        self._meetings = meetings
        self._rank = meetings.rank
        self._source = source
        self._step = step
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._peers: dict[int, socket.socket] = {}  # by rank
        self._ring_fd = -1

    def close(self) -> None:
        """Release everything but what a `SharedReads` has been given."""
        for one in (self._listener, *self._peers.values()):
            one.close()
        if self._ring_fd >= 0:
            os.close(self._ring_fd)

    def connected(self, num_bytes: int) -> SharedReads | None:
        """With the neighbours; None if there are none, or one of them lacks a connection."""
        groups = self._meetings.act(
            "restore(): looking for ranks of the same machine",
            lambda: self._place(num_bytes),
            merge=grouped(_together),
        )
        if not groups:
            return None
        own = next((group for group in map(members, groups) if self._rank in group), [])
        lacking = self._meetings.act(
            "restore(): connecting ranks of the same machine",
            lambda: not _works(partial(self._connect, own)),
            merge=who(list),
        )
        if not own or {*own}.intersection(lacking) or not _works(partial(self._accept, own)):
            return None
        return self._sharing(own)

    def _place(self, num_bytes: int) -> Json:
        """What neighbours have in common, once this rank listens; None: it has none."""
        said: list[Json] = []

        def listen() -> None:
            self._listener.bind(self._address(self._rank))
            self._listener.listen(_BACKLOG)
            said.append(_common(self._source.where(self._step), self._source.read_bytes))

        return said[0] if num_bytes >= SMALLEST_BYTES and _works(listen) else None

    def _address(self, rank: int) -> str:
        """Abstract: there is no file, and nothing is left behind."""
        return f"\0{self._meetings.name}/{rank}"

    def _connect(self, own: Sequence[int]) -> None:
        """Connect to those behind this rank, and say who it is; the first creates the memory."""
        fds = []
        if own and own[0] == self._rank:
            num_slots = slots_for(len(own), read_bytes=self._source.read_bytes)
            self._ring_fd = SharedRing.create(num_slots, read_bytes=self._source.read_bytes)
            fds = [self._ring_fd]
        for rank in own:
            if rank > self._rank:
                peer = self._peers[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                peer.settimeout(self._patience_s())
                peer.connect(self._address(rank))
                require_same_user(peer)
                socket.send_fds(peer, [_GREETING.pack(self._rank)], fds)

    def _accept(self, own: Sequence[int]) -> None:
        """Take the connections of those before this rank: they have all been made by now."""
        self._listener.settimeout(self._patience_s())
        for _ in range(own.index(self._rank)):
            peer, _ = self._listener.accept()
            with contextlib.ExitStack() as stack:
                stack.callback(peer.close)
                require_same_user(peer)
                peer.settimeout(self._patience_s())
                self._greeted(peer, own)
                stack.pop_all()

    def _greeted(self, peer: socket.socket, own: Sequence[int]) -> None:
        flags = socket.MSG_CMSG_CLOEXEC
        data, fds, _, _ = socket.recv_fds(peer, _GREETING.size, maxfds=1, flags=flags)
        self._ring_fd = fds[0] if fds else self._ring_fd
        (rank,) = _GREETING.unpack(data)
        if rank >= self._rank or rank not in own or rank in self._peers:
            raise HandoverError(f"expected one of {own} before {self._rank}, got {rank}")
        self._peers[rank] = peer

    def _sharing(self, own: Sequence[int]) -> SharedReads | None:
        read_bytes = self._source.read_bytes
        made: list[SharedReads] = []

        def make() -> None:
            num_slots = slots_for(len(own), read_bytes=read_bytes)
            ring = SharedRing(self._ring_fd, num_slots, read_bytes=read_bytes)
            peers = {own.index(rank): peer for rank, peer in self._peers.items()}
            member = own.index(self._rank)
            made.append(SharedReads(ring, member=member, peers=peers, patience_s=self._patience_s))

        if not _works(make):
            return None
        self._peers.clear()
        logger.debug("%d ranks of this machine share what they read", len(own))
        return made[0]

    def _patience_s(self) -> float:
        return _PATIENCE * self._meetings.patience_s()


def _works(action: Callable[[], object]) -> bool:
    try:
        action()
    except (OSError, HandoverError, struct.error) as error:
        logger.debug("reads are not shared with other ranks of this machine: %s", error)
        return False
    return True


def _common(path: str, read_bytes: int) -> Json:
    """The same for ranks that can share memory, and read the same directory in the same way."""
    directory = LocalFileOps(Path(path)).identity(Path(path))
    boot, network = _BOOT_ID.read_text().strip(), os.stat(_NETWORK).st_ino
    return [boot, network, os.geteuid(), *directory, read_bytes]


def _together(found: Sequence[tuple[Json, RankSet]]) -> Json:
    """The groups of neighbours, from who said the same."""
    return [ranks for said, ranks in found if said is not None and len(members(ranks)) > 1]
