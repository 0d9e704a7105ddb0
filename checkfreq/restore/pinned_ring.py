"""Host memory that reading threads fill while a device copies from it: a ring of pinned buffers.

A thread takes a buffer, reads into it, has copies queued from it and gives it back with functions
that wait for them. They are called before the buffer is taken again, so a thread reads the next
piece while the device copies the last one. All buffers together are all the host memory that a
restore onto devices needs: ``num_threads`` x ``BUFFERS_PER_THREAD`` x ``buffer_bytes``, 12 MiB for
4 threads and 1 MiB. They are one range, pinned in one call; where it cannot be pinned, copies from
it are slower and the host waits for them, but for each only when it is queued.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from checkfreq.restore.buffers import Wait, address_of, new_buffer
from checkfreq.snapshot.device import Device
from checkfreq.snapshot.pinning import pin_range
from checkfreq.types import PAGE_BYTES, size_text

logger = logging.getLogger(__name__)

#: One that is read into, one that is copied from, and one for data that lies elsewhere.
BUFFERS_PER_THREAD = 3
#: The most that all buffers of a restore may take, in bytes.
MAX_RING_BYTES = 60 << 20

#: Memory that a device may still be reading from: it must neither be unpinned nor reused.
_LOST: list[memoryview] = []


def largest_buffer_bytes(num_threads: int) -> int:
    """The largest buffers that so many threads can have, a multiple of the page."""
    pages = MAX_RING_BYTES // (num_threads * BUFFERS_PER_THREAD * PAGE_BYTES)
    return max(pages, 1) * PAGE_BYTES


class PinnedRing:
    """Buffers of ``buffer_bytes`` (a multiple of the page) for ``num_threads``; see Buffers."""

    def __init__(self, device: Device, *, num_threads: int, buffer_bytes: int) -> None:
        """Allocate and pin. Raises StorageError (ENOMEM) if there is not that much memory."""
        assert buffer_bytes % PAGE_BYTES == 0
        assert buffer_bytes <= largest_buffer_bytes(num_threads)
        self.num_bytes = num_threads * BUFFERS_PER_THREAD * buffer_bytes
        self.buffer_bytes = buffer_bytes
        self._memory = new_buffer(self.num_bytes)
        self._address = address_of(self._memory)
        self._lock = threading.Lock()
        self._free = [
            self._memory[at : at + buffer_bytes] for at in range(0, self.num_bytes, buffer_bytes)
        ]
        self._busy: deque[tuple[memoryview, Sequence[Wait]]] = deque()
        self._pins = pin_range(device, self._address, self.num_bytes)

    # ---- any thread

    def take(self) -> memoryview:
        """A buffer that no copy reads any more; raises what kept the copies from being done.

        No thread may hold more than ``BUFFERS_PER_THREAD`` less one, so there always is one.
        """
        with self._lock:
            if self._free:
                return self._free.pop()
            view, waits = self._busy.popleft()
        for wait in waits:
            wait()
        return view

    def give(self, view: memoryview, waits: Sequence[Wait] = ()) -> None:
        """Take a buffer back, from which the copies that ``waits`` wait for are still reading."""
        with self._lock:
            if waits:
                self._busy.append((view, waits))
            else:
                self._free.append(view)

    def holds(self, address: int) -> bool:
        """Whether an address lies in one of the buffers."""
        return self._address <= address < self._address + self.num_bytes

    # ---- the end, once; no thread uses it any more

    def close(self) -> None:
        """Unpin and free the memory, from which no copy reads any more."""
        if not self._pins.release():
            _LOST.append(self._memory)
        self._memory = memoryview(b"")
        self._free.clear()
        self._busy.clear()

    def abandon(self) -> None:
        """Keep the memory as it is until the process ends: a device may still be reading it."""
        _LOST.append(self._memory)
        logger.error(
            "%s of host memory stay allocated until the process ends: the device might still be "
            "reading from it",
            size_text(self.num_bytes),
        )
