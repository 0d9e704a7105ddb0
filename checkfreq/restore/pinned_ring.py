"""Host memory that reading threads fill while a device copies from it: a ring of pinned buffers.

A thread takes a buffer, reads into it, has copies queued from it and gives it back with functions
that wait for them. They are called before the buffer is taken again, so a thread reads the next
piece while the device copies the last one. Each thread adds ``BUFFERS_PER_THREAD`` buffers, pinned
in one call, when it takes its first: 12 MiB for 4 threads and 1 MiB. There is no other host memory
in a restore onto devices. What cannot be pinned is copied from too: the driver then copies before
a call returns, which is slower.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from checkfreq.restore.buffers import Wait, address_of, new_buffer
from checkfreq.restore.stream import MOST_THREADS
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


#: The largest buffers that ``MOST_THREADS`` can have, a multiple of the page.
LARGEST_BUFFER_BYTES = (
    MAX_RING_BYTES // (MOST_THREADS * BUFFERS_PER_THREAD * PAGE_BYTES) * PAGE_BYTES
)


class PinnedRing:
    """Buffers of ``buffer_bytes``, a multiple of the page; see Buffers."""

    def __init__(self, device: Device, *, buffer_bytes: int) -> None:
        assert buffer_bytes % PAGE_BYTES == 0
        assert buffer_bytes <= LARGEST_BUFFER_BYTES
        self.buffer_bytes = buffer_bytes
        self._device = device
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._threads: set[int] = set()
        self._blocks: list[_Block] = []
        self._free: list[memoryview] = []
        self._busy: deque[tuple[memoryview, Sequence[Wait]]] = deque()

    @property
    def num_bytes(self) -> int:
        """Of all buffers, now."""
        return sum(block.num_bytes for block in self._blocks)

    # ---- any thread

    def take(self) -> memoryview:
        """A buffer that no copy reads any more; raises what kept the copies from being done, and
        StorageError (ENOMEM) if there is no memory.

        No thread may hold more than ``BUFFERS_PER_THREAD`` less one, so there always is one.
        """
        self._add_own()
        with self._lock:
            if self._free:
                return self._free.pop()
            view, waits = self._busy.popleft()
        for wait in waits:
            wait()
        return view

    def _add_own(self) -> None:
        """Add the calling thread's buffers, if it has none and they are within the bound."""
        thread = threading.get_ident()
        if thread in self._threads:
            return
        num_bytes = self.buffer_bytes * BUFFERS_PER_THREAD
        with self._growing:  # a thread without its own then finds those of all that came before
            if (len(self._blocks) + 1) * num_bytes <= MAX_RING_BYTES:
                block = _Block(self._device, num_bytes)  # may take milliseconds
                with self._lock:
                    self._blocks.append(block)
                    self._free += block.cut(self.buffer_bytes)
            self._threads.add(thread)

    def give(self, view: memoryview, waits: Sequence[Wait] = ()) -> None:
        """Take a buffer back, from which the copies that ``waits`` wait for are still reading."""
        with self._lock:
            if waits:
                self._busy.append((view, waits))
            else:
                self._free.append(view)

    def holds(self, address: int) -> bool:
        """Whether an address lies in one of the buffers."""
        return any(block.holds(address) for block in self._blocks)

    # ---- the end, once; no thread uses it any more

    def close(self) -> None:
        """Unpin and free the memory, from which no copy reads any more."""
        self._free.clear()
        self._busy.clear()
        while self._blocks:
            self._blocks.pop().release()

    def abandon(self) -> None:
        """Keep the memory as it is until the process ends: a device may still be reading it."""
        _LOST.extend(block.memory for block in self._blocks)
        logger.error(
            "%s of host memory stay allocated until the process ends: the device might still be "
            "reading from it",
            size_text(self.num_bytes),
        )


class _Block:
    """The buffers that one thread has added: one range, pinned if that is possible."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.memory = new_buffer(num_bytes)
        self._address = address_of(self.memory)
        self._pins = pin_range(device, self._address, num_bytes)

    def cut(self, buffer_bytes: int) -> list[memoryview]:
        """The buffers."""
        starts = range(0, self.num_bytes, buffer_bytes)
        return [self.memory[at : at + buffer_bytes] for at in starts]

    def holds(self, address: int) -> bool:
        """Whether an address lies in it."""
        return self._address <= address < self._address + self.num_bytes

    def release(self) -> None:
        """Unpin it; memory that cannot be unpinned stays."""
        if not self._pins.release():
            _LOST.append(self.memory)
