"""Memory that a checkpoint is read into, and places in host memory that it goes to. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
from collections.abc import Callable, Sequence
from typing import Protocol

from checkfreq.errors import StorageError
from checkfreq.types import PAGE_BYTES

#: Fewer bytes are copied without giving up the interpreter lock, which takes longer than the copy.
_SMALL_BYTES = 32 << 10

#: Of most machines; where it is another, buffers lie in small pages.
_HUGE_PAGE_BYTES = 2 << 20

#: Waits until a copy has been made.
Wait = Callable[[], None]


class Buffers(Protocol):
    """Where a reading thread gets the memory that it reads into; called by several threads."""

    def take(self) -> memoryview:
        """Page-aligned memory of `buffer_bytes`; may wait for copies from it. One per thread."""

    def give(self, buffer: memoryview, waits: Sequence[Wait]) -> None:
        """Take back what `take` returned, from which copies may be under way.

        ``waits``: what targets returned. They are called before the memory is used again.
        """


class HostBuffers:
    """Buffers in ordinary memory, for reads of up to ``read_bytes``."""

    def __init__(self, read_bytes: int) -> None:
        self._num_bytes = buffer_bytes(read_bytes)
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """See Buffers. The one that was given back last: it is still in the cache."""
        try:
            return self._free.pop()
        except IndexError:
            return new_buffer(self._num_bytes)

    def give(self, buffer: memoryview, waits: Sequence[Wait]) -> None:
        """See Buffers; waits at once."""
        finish(waits)
        self._free.append(buffer)


def buffer_bytes(read_bytes: int) -> int:
    """Size of a buffer for reads of ``read_bytes``, a multiple of a page, from any offset."""
    return read_bytes + PAGE_BYTES


def finish(waits: Sequence[Wait]) -> None:
    """Call every one, whatever the others raise."""
    with contextlib.ExitStack() as stack:
        for wait in reversed(waits):
            stack.callback(wait)


class MemoryTarget:
    """A tensor's place in host memory: ``num_bytes`` from an address on.

    It takes the saved tensor's bytes from ``begin`` on. ``keep``: whatever owns the memory, kept
    alive as long as this.
    """

    __slots__ = ("_address", "_begin", "_keep", "_view")

    def __init__(
        self, address: int, num_bytes: int, *, begin: int = 0, keep: object = None
    ) -> None:
        self._address = address
        self._begin = begin
        self._keep = keep
        self._view = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")

    @classmethod
    def of(cls, buffer: memoryview) -> MemoryTarget:
        """The whole of a writable buffer."""
        return cls(address_of(buffer), buffer.nbytes, keep=buffer)

    def put(self, start: int, data: memoryview) -> None:
        """See `stream.Target`; the copy is done on return."""
        start, num_bytes = start - self._begin, len(data)
        if num_bytes < _SMALL_BYTES or start + num_bytes > len(self._view):
            self._view[start : start + num_bytes] = data  # ValueError beyond the end
        else:  # without the interpreter lock: other threads go on
            ctypes.memmove(self._address + start, address_of(data), num_bytes)


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of the C API."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        *((name, ctypes.c_void_p) for name in ("shape", "strides", "suboffsets", "internal")),
    )


def address_of(view: memoryview) -> int:
    """Where the bytes of a view lie in memory; ``ctypes`` itself tells it of writable ones only."""
    found = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), 0)
    address: int | None = found.buf
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
    return address or 0


def new_buffer(num_bytes: int) -> memoryview:
    """Page-aligned memory, freed with the last view of it.

    Private anonymous memory in huge pages. Page faults in fresh shared memory took three times as
    long as a read of the same size on a virtual machine, and direct reads into small pages twice as
    long as into huge ones, since a request to the disk holds only so many places (measured
    2026-11). Raises StorageError (ENOMEM) if there is not that much memory.
    """
    num_bytes = max(num_bytes, PAGE_BYTES)
    # A huge page has to begin at a multiple of its size; what is not touched takes no memory.
    spare = _HUGE_PAGE_BYTES if num_bytes >= _HUGE_PAGE_BYTES // 2 else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, num_bytes + 2 * spare, flags=flags)
    except (OSError, OverflowError) as error:  # a sparse file can be larger than any memory
        text = f"reading needs {num_bytes} bytes of memory, more than there can be: {error}"
        raise StorageError(errno.ENOMEM, text) from None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    start = -address_of(view) % spare if spare else 0
    return view[start : start + num_bytes]
