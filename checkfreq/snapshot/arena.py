"""Shared host memory for snapshots: a few slots, allocated once and reused.

Each slot is a memfd that the trainer and the persist worker both map, so a snapshot reaches the
worker without a copy and survives the trainer. A copy into fresh pages takes 2 s per GiB and one
into warm pages 0.06 s (measured), so a background thread faults the slots in before they are used;
with an accelerator they are pinned as well. A slot has one owner at a time: nobody (it is free),
the attempt that fills it, then the worker until the attempt has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from checkfreq.config import CFConfig
from checkfreq.errors import ConfigError
from checkfreq.snapshot.memory import available_host_bytes
from checkfreq.types import PAGE_BYTES, round_up_to_page

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23
#: Small enough that other threads get to the memory map in between, and that closing is quick.
_FAULT_CHUNK_BYTES = 64 << 20
#: Up to this size slots are faulted in at once: starting a thread would take longer.
_INLINE_BYTES = 16 << 20
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


@dataclass(slots=True, eq=False)
class Slot:
    """One reusable snapshot buffer of ``num_bytes`` (a multiple of the page size)."""

    index: int
    fd: int
    num_bytes: int
    memory: mmap.mmap
    address: int
    layout: object = None  # the StateLayout whose headers the slot holds now
    is_free: bool = True
    unpin: Callable[[], None] | None = field(default=None, repr=False)


class Pinner:
    """Page-locks memory for an accelerator; this base class is for hosts without one."""

    def pin(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """Pin, and return a function that unpins; None if nothing was pinned."""
        return None


class Arena:
    """The slots of one manager. All methods belong to the training thread."""

    def __init__(self, *, config: CFConfig, pinner: Pinner | None = None) -> None:
        self._config = config
        self._pinner = pinner or Pinner()
        self._slots: list[Slot] = []
        self._used_bytes = 0
        self._ready = threading.Event()
        self._unwanted = threading.Event()  # closed before the slots were ready
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

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
        """True when the slots are faulted in (and pinned)."""
        return self._ready.is_set()

    def wait_ready(self, *, timeout_s: float) -> bool:
        """Wait for the slots to be usable; raises the background thread's error, if any."""
        ready = self._ready.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return ready

    def allocate(self, state_bytes: int) -> None:
        """Make slots of ``state_bytes`` and some slack each; all slots must be free.

        Returns at once; a background thread faults the slots in and pins them (``wait_ready``).
        Raises ConfigError with the sizes if the memory that may be used has no room for even one.
        """
        assert all(slot.is_free for slot in self._slots)
        for slot in self._slots:
            os.ftruncate(slot.fd, 0)  # frees the pages now: the worker still maps them
        # Before the new slots are made: old and new ones together may not fit the memory.
        self.close()
        num_bytes, count = self._slot_bytes(state_bytes), self.num_affordable(state_bytes)
        self._slots = [_new_slot(index, num_bytes) for index in range(count)]
        self._used_bytes = round_up_to_page(state_bytes)
        self._ready.clear()
        self._unwanted.clear()
        self._error = None
        if num_bytes * count <= _INLINE_BYTES or not _CAN_POPULATE:
            self._prepare()
        else:
            self._thread = threading.Thread(
                target=self._prepare, name="checkfreq-prefault", daemon=True
            )
            self._thread.start()

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
            limit, source = available_host_bytes(), "the memory available to this process"
        wanted = self._config.num_slots
        if limit is None or wanted * num_bytes <= limit:
            return wanted
        count = limit // num_bytes
        if count == 0:
            raise ConfigError(
                f"a snapshot of {_mib(state_bytes)} of state needs a host buffer of "
                f"{_mib(num_bytes)}, but {source} is {_mib(limit)}. Raise the limit, give the "
                "process more memory, or track less state."
            )
        logger.warning(
            "%s is %s: using %d snapshot slot(s) of %s instead of %d",
            source,
            _mib(limit),
            count,
            _mib(num_bytes),
            wanted,
        )
        return int(count)

    # ---- ownership

    def has_free_slot(self) -> bool:
        """True if ``acquire`` would return a slot."""
        return any(slot.is_free for slot in self._slots)

    def may_have_room(self) -> bool:
        """False if a snapshot now would have to wait for a free slot, or for slots to be ready."""
        return not self._slots or (self.is_ready() and self.has_free_slot())

    def acquire(self) -> Slot | None:
        """Take a free slot, or None."""
        for slot in self._slots:
            if slot.is_free:
                slot.is_free = False
                return slot
        return None

    def release(self, slot: Slot) -> None:
        """Give a slot back, when its snapshot is durable or given up."""
        slot.is_free = True

    def close(self) -> None:
        """Unpin and unmap everything; idempotent."""
        if self._thread is not None:
            self._unwanted.set()
            self._thread.join()
            self._thread = None
        for slot in self._slots:
            if slot.unpin is not None:
                slot.unpin()
            with contextlib.suppress(BufferError):  # a view is still in use: unmapped with it
                slot.memory.close()
            os.close(slot.fd)
        self._slots = []

    # ---- background

    def _prepare(self) -> None:
        try:
            for slot in self._slots:
                for start in range(0, self._used_bytes, _FAULT_CHUNK_BYTES):
                    if self._unwanted.is_set():
                        return
                    _fault_in(slot, start, min(_FAULT_CHUNK_BYTES, self._used_bytes - start))
                slot.unpin = self._pinner.pin(slot.address, slot.num_bytes)
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()  # last: `wait_ready` reads the error once this is set


def _new_slot(index: int, num_bytes: int) -> Slot:
    fd = os.memfd_create(f"checkfreq-slot-{index}", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)  # training state, whatever the umask
    os.ftruncate(fd, num_bytes)
    memory = mmap.mmap(fd, num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return Slot(index, fd, num_bytes, memory, address)


def _fault_in(slot: Slot, start: int, num_bytes: int) -> None:
    """Fault in a part of a slot; the slack is not touched and takes no memory."""
    address = slot.address + start
    if not _CAN_POPULATE:
        ctypes.memset(ctypes.c_void_p(address), 0, num_bytes)
    elif not _populate(address, num_bytes):
        code = ctypes.get_errno()
        raise MemoryError(
            f"cannot fault in {_mib(num_bytes)} of snapshot memory: {os.strerror(code)}. "
            "Lower CFConfig.num_slots or give the process more memory."
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
