"""What a killed run left in memory: its worker, its slots, and the snapshots in them.

Each rank takes over its own worker, and reads what the other ranks' workers on this machine hold:
so every rank asks before any takes. A worker that this run cannot use is told to let go. What was
taken over is read from until the run has restored. Belongs to the training thread.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checkfreq.errors import CorruptCheckpointError
from checkfreq.persist import handover
from checkfreq.persist.frames import HandoverError, Purpose, Stage
from checkfreq.persist.handover import Offer
from checkfreq.persist.persistence import Persistence
from checkfreq.restore.memory import HeldSnapshot
from checkfreq.snapshot.arena import Arena
from checkfreq.types import Role

logger = logging.getLogger(__name__)


class Inheritance:
    """The memory that earlier workers hold for one directory."""

    def __init__(self, chk_dir: Path, *, role: Role) -> None:
        self._chk_dir = chk_dir
        self._role = role
        self._own: Offer | None = None
        self._held: list[HeldSnapshot] = []

    @property
    def held(self) -> tuple[HeldSnapshot, ...]:
        """The snapshots that can be read, until `let_go`."""
        return tuple(self._held)

    def ask(self) -> None:
        """Find out what there is for this rank, and look into what the others' workers hold."""
        role = self._role
        self._own = handover.ask(self._chk_dir, role.rank, world=role.world)
        for rank in role.group:
            if rank != role.rank:
                self._look_into(rank)

    def decline(self) -> None:
        """Have every worker of an earlier run that this rank answers for let go."""
        for rank in handover.ranks_in(self._chk_dir):
            if rank == self._role.rank or (self._role.leads and rank not in self._role.group):
                handover.release(self._chk_dir, rank)

    def take(self, arena: Arena, persistence: Persistence) -> bool:
        """Make the worker and its slots this run's; False if there is none to be taken over."""
        offer, self._own = self._own, None
        if self._role.leads:
            self._release_other_ranks()
        if offer is None:
            return False
        with offer:
            if offer.body.role != self._role:
                offer.release()
                return False
            return self._take(offer, arena, persistence)

    def let_go(self) -> None:
        """Nothing is read from memory any more."""
        self._held = []

    def _take(self, offer: Offer, arena: Arena, persistence: Persistence) -> bool:
        body, fds = offer.body, tuple(offer.slot_fds.values())
        held = [one.slot for one in body.in_flight]
        try:
            arena.adopt(_slots_of(offer), held=held, newest=body.newest_slot)
            persistence.adopt(offer, arena.slots)
        except (CorruptCheckpointError, ValueError, OSError) as error:
            logger.debug("the memory of the run before cannot be used: %s", error)
            arena.close()
            offer.release()
            return False
        except HandoverError as error:
            logger.debug("the memory of the run before is gone: %s", error)
            arena.close()
            return False
        for fd in fds:  # the arena has its own
            os.close(fd)
        views = {slot.index: memoryview(slot.memory).toreadonly() for slot in arena.slots}
        self._hold(offer, views)
        return True

    def _look_into(self, rank: int) -> None:
        """Map the slots of another rank's worker, which stays its own."""
        offer = handover.ask(self._chk_dir, rank, world=self._role.world, purpose=Purpose.FETCH)
        if offer is None:
            return
        with offer, contextlib.suppress(OSError, ValueError):
            self._hold(offer, {n: _mapped(fd) for n, fd in offer.slot_fds.items()})

    def _hold(self, offer: Offer, memory: Mapping[int, memoryview]) -> None:
        self._held += [
            HeldSnapshot(
                one.step,
                one.attempt,
                one.record,
                one.slot_offsets,
                memory[one.slot],
                is_whole=self._role.is_alone,
                is_durable=one.stage is Stage.DURABLE,
            )
            for one in offer.body.snapshots
        ]

    def _release_other_ranks(self) -> None:
        """Of a run with more ranks, or with other ones in this directory."""
        for rank in handover.ranks_in(self._chk_dir):
            if rank not in self._role.group:
                handover.release(self._chk_dir, rank)


@dataclass(frozen=True, slots=True)
class _Offered:
    index: int
    fd: int
    num_bytes: int


def _slots_of(offer: Offer) -> list[_Offered]:
    sizes = dict(offer.body.slots)
    return [_Offered(index, fd, sizes[index]) for index, fd in sorted(offer.slot_fds.items())]


def _mapped(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
