"""Shared host memory for snapshots: a few slots, allocated once and reused.

Each slot is a memfd that the trainer and the persist worker both map, so a snapshot reaches the
worker without a copy and survives the trainer. A copy into fresh pages takes 2 s per GiB and one
into warm pages 0.06 s (measured), so a background thread faults the slots in before they are used;
with an accelerator it pins them as well. Before that it gives back those that the state has
outgrown, which also takes 1 s per GiB. A slot has one owner at a time: nobody (it is free), the
attempt that fills it, then the worker until the attempt has ended. Memory that a driver may still
write to is neither truncated nor unmapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from checkfreq.config import CFConfig
from checkfreq.errors import ConfigError
from checkfreq.snapshot.memory import available_host_bytes
from checkfreq.types import PAGE_BYTES, ContentId, round_up_to_page, size_text

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23
#: Small enough that other threads get to the memory map in between, and that closing is quick.
_FAULT_CHUNK_BYTES = 64 << 20
#: Up to this size slots are faulted in at once: starting a thread would take longer.
_INLINE_BYTES = 16 << 20
_BLOCK_BYTES = 512  # of ``st_blocks``
_libc = ctypes.CDLL(None, use_errno=True)


def _populate(address: int, num_bytes: int) -> bool:
    result = _libc.madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE
    )
    return bool(result == 0)


def _kernel_can_populate() -> bool:
    """Whether pages can be faulted in without changing their content (Linux 5.14 and later)."""
    with mmap.mmap(-1, PAGE_BYTES) as page:
        return _populate(ctypes.addressof(ctypes.c_char.from_buffer(page)), PAGE_BYTES)


_CAN_POPULATE = _kernel_can_populate()


class Pins(Protocol):
    """What ``Pinner.pin`` has page-locked.

    num_bytes: how much of the slot; less than all of it only where undoing a failure failed.
    seconds: how long the driver took for it.
    """

    num_bytes: int
    seconds: float

    def release(self, *, hurry: threading.Event | None = None) -> bool:
        """Unpin; False if a part of it remains: the memory must stay mapped. Idempotent.

        Takes its time, as ``Pinner.pin`` does, until ``hurry`` is set; without one, none.
        """
        ...


class Pinner:
    """Page-locks memory for an accelerator; this base class is for hosts without one."""

    #: Memory is pinned in pieces of this size, and no copy by the accelerator may cross from one
    #: to the next. It is a multiple of the page.
    piece_bytes = 1 << 30

    def is_wanted(self) -> bool:
        """Whether ``pin`` would try."""
        return False

    def pin(
        self, address: int, num_bytes: int, *, hurry: threading.Event, stop: threading.Event
    ) -> Pins | None:
        """Pin all of it or nothing (None); no copy to it may be under way.

        Takes its time, so that others get to the driver, until ``hurry`` is set; ends without
        having pinned anything when ``stop`` is set.
        """
        return None


@dataclass(slots=True, eq=False)
class Slot:
    """One reusable snapshot buffer of ``num_bytes`` (a multiple of the page size).

    No copy by an accelerator may cross a multiple of ``piece_bytes``.
    """

    index: int
    fd: int
    num_bytes: int
    memory: mmap.mmap
    address: int
    piece_bytes: int
    layout: object = None  # the StateLayout whose headers the slot holds now
    #: By name, what the files hold that are not expected to change.
    contents: dict[str, ContentId] = field(default_factory=dict)
    #: Which copy of the frozen tensors the slot holds now, in this layout; None: none.
    frozen: ContentId | None = None
    is_free: bool = True
    #: When the complete snapshot in it was taken (``time.perf_counter``); None if it holds none.
    complete_s: float | None = None
    pins: Pins | None = field(default=None, repr=False)


class OfferedSlot(Protocol):
    """A slot that an earlier process made."""

    @property
    def index(self) -> int:
        """Its number."""
        ...

    @property
    def fd(self) -> int:
        """An open descriptor of its memory."""
        ...

    @property
    def num_bytes(self) -> int:
        """Its size."""
        ...


#: Slots that could not be unpinned. Were they unmapped, a driver could write to whatever comes to
#: lie at their addresses; so they stay until the process ends.
_still_pinned: list[Slot] = []


class Arena:
    """The slots of one manager. All methods belong to the training thread.

    ``close_timeout_s``: how long to wait for the background thread, which only a call of a driver
    that hangs outlasts. ``available_bytes``: host memory that is still to be had; None if unknown.
    """

    def __init__(
        self,
        *,
        config: CFConfig,
        pinner: Pinner | None = None,
        close_timeout_s: float = 60.0,
        available_bytes: Callable[[], int | None] = available_host_bytes,
    ) -> None:
        self._config = config
        self._close_timeout_s = close_timeout_s
        self._available_bytes = available_bytes
        self._pinner = pinner or Pinner()
        self._slots: list[Slot] = []
        self._preparation: _Preparation | None = None  # the latest, also when it has ended
        self._all_pinned = False
        self._is_outgrown = False
        self._usable_bytes: int | None = None

    # ---- size

    @property
    def slot_bytes(self) -> int:
        """Size of the smallest slot; 0 before the first allocation."""
        return min((slot.num_bytes for slot in self._slots), default=0)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots."""
        return tuple(self._slots)

    def is_ready(self) -> bool:
        """True when the slots are faulted in, and none is being pinned."""
        return self._preparation is not None and self._preparation.ended.is_set()

    def wait_ready(self, *, timeout_s: float) -> bool:
        """Wait for the slots to be usable; raises the background thread's error, if any."""
        preparation = self._preparation
        if preparation is None or not preparation.ended.wait(timeout_s):
            return False
        if preparation.error is not None:
            raise preparation.error
        return True

    def hurry(self) -> None:
        """Be ready soon: a checkpoint waits that must be taken.

        One slot is pinned, without pauses. The others stay unpinned until the next ``pin``: copies
        into them work, but hold the training thread.
        """
        if self._preparation is not None:
            self._preparation.hurry.set()

    def allocate(self, state_bytes: int) -> None:
        """Make slots of ``state_bytes`` and some slack each; all slots must be free.

        Returns at once; a background thread gives the memory of the slots before back, faults the
        new ones in and pins them (``wait_ready``). Raises ConfigError with the sizes if the memory
        that may be used has no room for even one; the slots before stay then.
        """
        assert all(slot.is_free for slot in self._slots)
        num_bytes, count = self._slot_bytes(state_bytes), self.num_affordable(state_bytes)
        piece_bytes = self._pinner.piece_bytes
        old = self._slots
        self._slots = [_new_slot(index, num_bytes, piece_bytes) for index in range(count)]
        self._all_pinned = self._is_outgrown = False
        # The worker still maps the old ones: truncating them frees their pages now.
        drop = partial(self._drop, old, self._preparation, truncate=True)
        fault_in_bytes = round_up_to_page(state_bytes)
        self._start(_Preparation(self._slots, self._pinner, fault_in_bytes, old=old, drop=drop))

    def adopt(
        self,
        offered: Sequence[OfferedSlot],
        *,
        held: Collection[int] = (),
        newest: int | None = None,
    ) -> None:
        """Take over slots that an earlier process made, with descriptors of its own.

        Those ``held``, by number, are not free; ``newest`` holds the newest complete snapshot.
        ``fault_in`` makes them ready. Raises OSError, and ValueError for a slot that is not as
        large as it is said to be; nothing is taken over then.
        """
        assert not self._slots
        made: list[Slot] = []
        with contextlib.ExitStack() as on_failure:
            for one in offered:
                made.append(_adopted_slot(one, self._pinner.piece_bytes))
                on_failure.callback(_free, made[-1], truncate=False)
            on_failure.pop_all()
        for slot in made:
            slot.is_free = slot.index not in held
            slot.complete_s = time.perf_counter() if slot.index == newest else None
        self._slots = made
        self._is_outgrown = len(made) != self._config.num_slots
        self._all_pinned = False

    def fault_in(self) -> None:
        """Map the pages that slots which were taken over have, in the background; none is added.

        Call it when nobody reads the snapshots in them any more: both take the same time of the
        processor. Nothing to do for other slots.
        """
        if self._slots and self._preparation is None:
            self._start(_Preparation(self._slots, Pinner(), fault_in_bytes=None))

    def fits(self, state_bytes: int) -> bool:
        """Whether such a state can be copied to the slots there are.

        Of slots that were taken over there may also be too few, or more than are wanted now.
        """
        has_slots = bool(self._slots)  # a rank may have no tensors of its own, and write its part
        return has_slots and state_bytes <= self.slot_bytes and not self._is_outgrown

    def pin(self) -> None:
        """Pin, in the background, slots that are free and not pinned yet; not ready meanwhile.

        For slots that were made before the state was on a device, or left unpinned by ``hurry``.
        Cheap if there is nothing to do.
        """
        if self._all_pinned or not self.is_ready() or not self._pinner.is_wanted():
            return
        unpinned = [slot for slot in self._slots if slot.pins is None]
        self._all_pinned = not unpinned
        free = [slot for slot in unpinned if slot.is_free]
        if free:
            self._start(_Preparation(free, self._pinner, fault_in_bytes=0))

    def _start(self, preparation: _Preparation) -> None:
        """Prepare slots: a few small ones at once, otherwise in the background."""
        is_quick = self._preparation is None or self._preparation.ended.is_set()
        self._preparation = preparation
        if not is_quick or preparation.num_bytes > _INLINE_BYTES:
            preparation.run_in_background()
        else:
            preparation.hurry.set()
            preparation.run()

    def _slot_bytes(self, state_bytes: int) -> int:
        return round_up_to_page(int(state_bytes * (1 + self._config.arena_slack)) + PAGE_BYTES)

    def num_affordable(self, state_bytes: int) -> int:
        """How many slots for such a state fit the memory that may be used, ``num_slots`` at most.

        Raises ConfigError with the sizes if not even one does.
        """
        num_bytes = self._slot_bytes(state_bytes)
        limit = self._config.host_memory_limit
        source = "CFConfig.host_memory_limit"
        if limit is None:
            limit, source = self._usable(), "the memory available to this process"
        wanted = self._config.num_slots
        if limit is None or wanted * num_bytes <= limit:
            return wanted
        count = limit // num_bytes
        if count == 0:
            raise ConfigError(
                f"a snapshot of {size_text(state_bytes)} of state needs a host buffer of "
                f"{size_text(num_bytes)}, but {source} is {size_text(limit)}. Raise the limit, "
                "give the process more memory, or track less state."
            )
        logger.warning(
            "%s is %s: using %d snapshot slot(s) of %s instead of %d",
            source,
            size_text(limit),
            count,
            size_text(num_bytes),
            wanted,
        )
        return int(count)

    def _usable(self) -> int | None:
        """What this process may use, and what its slots have now; None if unknown."""
        if self._preparation is None or not self._preparation.is_dropping:
            available = self._available_bytes()
            of_slots = sum(map(_resident_bytes, self._slots))
            self._usable_bytes = None if available is None else available + of_slots
        return self._usable_bytes  # as it was before the slots that are being dropped were

    # ---- ownership

    def has_free_slot(self) -> bool:
        """True if ``acquire`` would return a slot."""
        return any(slot.is_free for slot in self._slots)

    def may_have_room(self) -> bool:
        """False if a snapshot now would have to wait for a free slot, or for slots to be ready."""
        return not self._slots or (self.is_ready() and self.has_free_slot())

    def acquire(self) -> Slot | None:
        """Take a free slot, or None.

        The newest complete snapshot is overwritten last: were this process killed now, the next
        one would restore it from memory.
        """
        free = [slot for slot in self._slots if slot.is_free]
        if not free:
            return None
        slot = min(free, key=lambda slot: slot.complete_s or 0.0)
        slot.is_free, slot.complete_s = False, None
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot back, when its snapshot is durable or given up."""
        slot.is_free = True

    def close(self) -> None:
        """Unpin and unmap everything; idempotent."""
        preparation, self._preparation = self._preparation, None
        # The worker may still be writing one to disk.
        self._drop(self._slots, preparation, truncate=False)
        self._slots = []

    def _drop(
        self,
        slots: Sequence[Slot],
        preparation: _Preparation | None,
        *,
        truncate: bool,
        hurry: threading.Event | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Unpin and unmap slots, after the latest preparation of some of them; any thread.

        Where ``stop`` is set, pages go when the last process unmaps them, not before.
        """
        is_stopped = preparation is None or preparation.cancel(timeout_s=self._close_timeout_s)
        for slot in slots:
            # Unpinned first: a driver must not have pages that the file no longer has.
            if is_stopped and (slot.pins is None or slot.pins.release(hurry=hurry)):
                _free(slot, truncate=truncate, stop=stop)
            else:
                _still_pinned.append(slot)


class _Preparation:
    """Faults slots in and pins them, in one thread or in the caller's.

    ``fault_in_bytes`` of each; None: what they have already, whose content stays. ``drop`` gives
    the memory of ``old`` slots back before: both may not fit. ``hurry``: somebody waits for the
    slots. ``ended`` is set in any case, after ``error``.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        pinner: Pinner,
        fault_in_bytes: int | None,
        *,
        old: Sequence[Slot] = (),
        drop: Callable[..., None] | None = None,
    ) -> None:
        self.slots = slots
        self.num_bytes = sum(slot.num_bytes for slot in (*slots, *old))
        self.hurry = threading.Event()
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._pinner = pinner
        self._fault_in_bytes = fault_in_bytes
        self._drop = drop
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_dropping(self) -> bool:
        """Whether old slots still have memory."""
        return self._drop is not None and not self.ended.is_set()

    def run_in_background(self) -> None:
        self._thread = threading.Thread(target=self.run, name="checkfreq-prefault", daemon=True)
        self._thread.start()

    def run(self) -> None:
        try:
            if self._drop is not None:
                self._drop(hurry=self.hurry, stop=self._stop)
                self._drop = None
            for slot in self.slots:
                self._fault_in(slot)
                if self._may_pin():
                    self._pin(slot)
            self._note_pinned()
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()

    def cancel(self, *, timeout_s: float) -> bool:
        """End early; False if the thread does not end, since a call of the driver hangs."""
        self._stop.set()
        self.hurry.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error(
                "the thread that pins snapshot memory did not end within %.0f s; the driver may "
                "hang. The memory stays allocated until the process ends",
                timeout_s,
            )
        return not self._thread.is_alive()

    def _fault_in(self, slot: Slot) -> None:
        num_bytes = self._fault_in_bytes
        if num_bytes is None:
            num_bytes = _resident_bytes(slot) if _CAN_POPULATE else 0
        for start in range(0, num_bytes, _FAULT_CHUNK_BYTES):
            if self._stop.is_set():
                return
            _fault_in(slot, start, min(_FAULT_CHUNK_BYTES, num_bytes - start))

    def _may_pin(self) -> bool:
        """Somebody who waits needs one slot, and copies sooner if that one is pinned."""
        is_enough = any(slot.pins is not None for slot in self.slots)
        return self._thread is None or not self.hurry.is_set() or not is_enough

    def _pin(self, slot: Slot) -> None:
        slot.pins = self._pinner.pin(
            slot.address, slot.num_bytes, hurry=self.hurry, stop=self._stop
        )

    def _note_pinned(self) -> None:
        pinned = [slot.pins for slot in self.slots if slot.pins is not None]
        if pinned:
            logger.info(
                "pinned %s in %.3g s",
                size_text(sum(pins.num_bytes for pins in pinned)),
                sum(pins.seconds for pins in pinned),
            )


def _new_slot(index: int, num_bytes: int, piece_bytes: int) -> Slot:
    fd = os.memfd_create(f"checkfreq-slot-{index}", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)  # training state, whatever the umask
    os.ftruncate(fd, num_bytes)
    return _mapped_slot(index, fd, num_bytes, piece_bytes)


def _mapped_slot(index: int, fd: int, num_bytes: int, piece_bytes: int) -> Slot:
    memory = mmap.mmap(fd, num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return Slot(index, fd, num_bytes, memory, address, piece_bytes)


def _adopted_slot(offered: OfferedSlot, piece_bytes: int) -> Slot:
    size = os.fstat(offered.fd).st_size
    if offered.num_bytes > size or offered.num_bytes % PAGE_BYTES:  # reading it would be SIGBUS
        raise ValueError(f"slot {offered.index} has {size} bytes, not {offered.num_bytes}")
    fd = os.dup(offered.fd)
    try:
        return _mapped_slot(offered.index, fd, offered.num_bytes, piece_bytes)
    except BaseException:
        os.close(fd)
        raise


def _free(slot: Slot, *, truncate: bool, stop: threading.Event | None = None) -> None:
    """Unmap it; ``truncate``: free its pages first, whoever maps it, unless ``stop`` is set."""
    if truncate:
        for size in range(slot.num_bytes - _FAULT_CHUNK_BYTES, 0, -_FAULT_CHUNK_BYTES):
            if stop is not None and stop.is_set():
                break
            os.ftruncate(slot.fd, size)
        else:
            os.ftruncate(slot.fd, 0)
    with contextlib.suppress(BufferError):  # a view is still in use: unmapped with it
        slot.memory.close()
    os.close(slot.fd)


def _resident_bytes(slot: Slot) -> int:
    """How much of a slot has memory; the rest is slack at its end."""
    return min(slot.num_bytes, os.fstat(slot.fd).st_blocks * _BLOCK_BYTES)


def _fault_in(slot: Slot, start: int, num_bytes: int) -> None:
    """Fault in a part of a slot; the slack is not touched and takes no memory."""
    address = slot.address + start
    if not _CAN_POPULATE:
        ctypes.memset(ctypes.c_void_p(address), 0, num_bytes)
    elif not _populate(address, num_bytes):
        code = ctypes.get_errno()
        raise MemoryError(
            f"cannot fault in {size_text(num_bytes)} of snapshot memory: {os.strerror(code)}. "
            "Lower CFConfig.num_slots or give the process more memory."
        )
