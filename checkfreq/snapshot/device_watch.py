"""The watch over settled tensors of one device: read twice on its streams, compared on the host.

The first reading is queued on the compute stream at the boundary, the second behind the copies and
in front of the event that updates wait for, so no update that asks the fence comes between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from checkfreq.snapshot.arena import Slot
from checkfreq.snapshot.device import Pair
from checkfreq.snapshot.engine import Copy
from checkfreq.snapshot.packing import target_and_source
from checkfreq.snapshot.watch import SAMPLE_BYTES, Watch

#: Every element type is aligned to this.
_ALIGNMENT = 16
#: Both readings of a snapshot fit.
BUFFER_BYTES = 2 * SAMPLE_BYTES


class DeviceWatch:
    """``buffer`` on the device and ``host`` are `[BUFFER_BYTES] uint8`."""

    def __init__(self, watched: Sequence[Watch], buffer: Tensor, host: Tensor) -> None:
        self.buffer = buffer
        self.host = host
        self._watched = watched
        *self._begins, self._size = accumulate(map(_aligned, watched), initial=0)

    def reading(self, *, second: bool) -> list[Pair]:
        """(target, source) of one reading."""
        first_byte = self._size if second else 0
        pairs = []
        for watch, begin in zip(self._watched, self._begins, strict=True):
            elements = Copy(watch.name, watch.view(), 0, watch.num_bytes, True)
            pairs.append(target_and_source(elements, self.buffer, first_byte + begin))
        return pairs

    def fetch(self) -> list[Pair]:
        """(target, source) of the transfer of both readings to the host."""
        return [(self.host[: 2 * self._size], self.buffer[: 2 * self._size])]

    def changed(self, slot: Slot) -> list[str]:
        """Tensors that differed, or that lie otherwise in the slot; once both have arrived."""
        both = self.host[: 2 * self._size].numpy().tobytes()
        names = []
        for watch, begin in zip(self._watched, self._begins, strict=True):
            first = both[begin : begin + watch.num_bytes]
            second = both[self._size + begin : self._size + begin + watch.num_bytes]
            if first != second or first != watch.read_slot(slot):
                names.append(watch.name)
        return names


def _aligned(watch: Watch) -> int:
    return -(-watch.num_bytes // _ALIGNMENT) * _ALIGNMENT
