"""Whether a device has memory for a snapshot that training will not miss.

The driver is asked in the helper thread only; the training thread goes by the latest answer,
corrected by what PyTorch's allocator has reserved since, which it knows without the driver. What
counts as room is what the driver can still give: memory that the allocator has cached lies in
pieces, and nobody can tell whether one of them is large enough. What an iteration reserves at its
peak and has given back since is subtracted, since the next iteration takes it again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from checkfreq.snapshot.device import Device, MemoryUse

logger = logging.getLogger(__name__)


#: The most that is allocated at a time where nobody tells how much memory is free.
_UNTOLD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Look:
    """What the driver could give when it was asked, and what was reserved at that time."""

    free_bytes: int
    use: MemoryUse

    def left_bytes(self, now: MemoryUse) -> int:
        """What the driver can give beyond the need of training; negative if less than that."""
        free = self.free_bytes + self.use.reserved_bytes - now.reserved_bytes
        free = min(free, now.limit_bytes - now.reserved_bytes)
        return free - max(0, now.peak_bytes - now.reserved_bytes)


class DeviceRoom:
    """The memory of one device, as snapshots may use it.

    A buffer that is refused for lack of room is not asked for again before a later look finds room
    for it and for the reserve twice over, so that it does not come and go. If training ran short
    while there was a buffer, or an allocation failed although there seemed to be room, the device
    gives none for the rest of the run: nothing says that training will not need as much again.

    An allocator that is not PyTorch's own may tell nothing. It has room for what helps each copy,
    and for no buffer.
    """

    def __init__(self, device: Device, index: torch.device, *, reserve_bytes: int) -> None:
        self._device = device
        self._index = index
        self._reserve_bytes = reserve_bytes
        # Replaced as a whole by the helper thread, read by both threads.
        self._look: _Look | None = None
        self._refused_bytes: int | None = None
        self._is_given_up = False
        self._tells_nothing = False
        self._num_shortages = 0

    # ---- helper thread

    def look(self) -> None:
        """Ask the driver; a refusal is said once."""
        try:
            use = self._device.memory_use(self._index)
            free = self._device.free_bytes(self._index)
        except RuntimeError as error:  # also of a broken device, which the next snapshot reports
            self._look = None
            if not self._tells_nothing:
                self._tells_nothing = True
                logger.warning(
                    "%s: cannot tell how much memory is free: %s. Snapshots go straight to host "
                    "memory",
                    self._index,
                    error,
                )
            return
        self._tells_nothing = False
        self._look = None if free is None else _Look(free, use)
        if self._refused_bytes is not None and self._has_ample_room(self._refused_bytes):
            self._refused_bytes = None

    def is_short(self) -> bool:
        """Whether training needs the memory of the buffer that was granted."""
        if self.has_run_short():
            return True
        look = self._look
        return look is None or look.left_bytes(look.use) < self._reserve_bytes

    def has_run_short(self) -> bool:
        """Whether an allocation has failed since the grant; asks the allocator, not the driver."""
        if self._device.memory_use(self._index).num_shortages > self._num_shortages:
            self.give_up()
        return self._is_given_up

    # ---- training thread

    def has(self, num_bytes: int) -> bool:
        """Whether memory can be allocated without a flush of the allocator's cache.

        Certain unless something other than the allocator has taken memory since the latest look.
        """
        look = self._look
        if look is None:
            return self._tells_nothing and num_bytes <= _UNTOLD_BYTES
        left = look.left_bytes(self._device.memory_use(self._index))
        return left >= self._device.segment_bytes(num_bytes)

    def grants(self, num_bytes: int) -> bool:
        """Whether a snapshot may have a buffer of this size; a refusal is remembered."""
        if self._is_given_up or self._look is None:
            return False
        if self._refused_bytes is not None and num_bytes >= self._refused_bytes:
            return False
        if self.has(num_bytes + self._reserve_bytes):
            self._num_shortages = self._device.memory_use(self._index).num_shortages
            return True
        self._refuse(num_bytes)
        return False

    # ---- any thread

    @property
    def is_known(self) -> bool:
        """Whether the driver has answered."""
        return self._look is not None

    def give_up(self) -> None:
        """Grant no buffer any more."""
        if not self._is_given_up:
            self._is_given_up = True
            logger.warning(
                "%s: training needs the device memory that snapshots have used. From now on they "
                "go straight to host memory",
                self._index,
            )

    def spare_bytes(self, held_bytes: int) -> int | None:
        """The largest buffer that would be granted now; None if that is not known.

        ``held_bytes`` is the size of the buffer that was granted and is still held.
        """
        look = self._look
        if look is None:
            return None
        if self._is_given_up or self._refused_bytes is not None:
            return 0
        return max(0, look.left_bytes(look.use) - self._reserve_bytes + held_bytes)

    def _has_ample_room(self, num_bytes: int) -> bool:
        look = self._look
        if look is None:
            return False
        wanted = self._device.segment_bytes(num_bytes + 2 * self._reserve_bytes)
        return look.left_bytes(look.use) >= wanted

    def _refuse(self, num_bytes: int) -> None:
        if self._refused_bytes is None:
            logger.warning(
                "%s: no room for a snapshot of %.1f MiB beside what training needs at its peak. "
                "Snapshots go straight to host memory until there is",
                self._index,
                num_bytes / 2**20,
            )
        self._refused_bytes = num_bytes
