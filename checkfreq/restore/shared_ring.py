"""Memory in which the ranks of one machine hand pieces of a checkpoint to one another. No torch.

A ring of slots, each for one read. Every member fills slots of its own, in turn: their number is a
multiple of that of the members. Who may touch a slot, and when, is the business of `shared_reads`.
"""

from __future__ import annotations

import mmap
import os

from checkfreq.restore.buffers import MemoryTarget, buffer_bytes

#: All slots together take no more; so many members cannot share that have not one slot each.
MOST_BYTES = 64 << 20
#: Of one member, where there is room for them.
_SLOTS_EACH = 8


def slots_for(members: int, *, read_bytes: int) -> int:
    """How many slots ``members`` have together; 0 if there is no room for one each."""
    each = MOST_BYTES // (buffer_bytes(read_bytes) * members)
    return min(each, _SLOTS_EACH) * members


class SharedRing:
    """``num_slots`` slots for reads of up to ``read_bytes``, mapped from a descriptor."""

    def __init__(self, fd: int, num_slots: int, *, read_bytes: int) -> None:
        slot_bytes = buffer_bytes(read_bytes)
        if (found := os.fstat(fd).st_size) != num_slots * slot_bytes:
            raise OSError(f"expected a ring of {num_slots} times {slot_bytes} bytes, got {found}")
        memory = memoryview(mmap.mmap(fd, num_slots * slot_bytes))
        self.num_slots = num_slots
        self._slots = [memory[n * slot_bytes : (n + 1) * slot_bytes] for n in range(num_slots)]

    @staticmethod
    def create(num_slots: int, *, read_bytes: int) -> int:
        """A descriptor of new memory, all of it there; OSError if there is not that much."""
        if num_slots == 0:
            raise OSError("too many ranks: there is no room for a slot each")
        fd = os.memfd_create("checkfreq-restore", os.MFD_CLOEXEC)
        try:
            # Or a page that cannot be had would end the process when it is touched.
            os.posix_fallocate(fd, 0, num_slots * buffer_bytes(read_bytes))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def put(self, number: int, data: memoryview) -> None:
        """Copy ``data`` to the beginning of the slot of piece ``number``."""
        MemoryTarget.of(self._slots[number % self.num_slots]).put(0, data)

    def get(self, number: int, data: memoryview) -> None:
        """Fill ``data`` from the beginning of that slot."""
        MemoryTarget.of(data).put(0, self._slots[number % self.num_slots][: len(data)])
