"""Fills live tensors on accelerators from a ring of pinned buffers, beside the reading threads.

Each device has a side stream, on which all copies to it are queued; a buffer is used again after
the event behind its copies.

* The side stream first waits for the stream that is current when the copies begin: the script may
  have just queued what initialises the tensors. That stream then waits for the last copy, before
  what training queues next: also if the host gives up, so an older checkpoint that is loaded
  instead comes later.
* Tensors that are not row-major are filled through one buffer on the device, in pieces. Queuing the
  copy into it and the copy out of it is one step under the lock, and the order of the stream does
  the rest.
* The host waits for all copies before the ring is unpinned, whatever has failed, with a deadline.
  If that passes, or nobody can tell whether copies still run, their memory is never used again.

Bytes are bytes: a dtype matters only where strides are, and there bits are copied, not numbers,
unless the live tensor has another dtype.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from checkfreq.errors import StateError
from checkfreq.restore.buffers import Buffers, Wait, buffer_bytes
from checkfreq.restore.pinned_ring import LARGEST_BUFFER_BYTES, PinnedRing
from checkfreq.restore.row_major import parts_of
from checkfreq.snapshot.backends import owner_of
from checkfreq.snapshot.device import Device, Event, Pair, Stream
from checkfreq.snapshot.packing import as_bits, is_plain
from checkfreq.store.boxes import Box

logger = logging.getLogger(__name__)

#: As long as a weight update waits for a copy; work queued by the script before may take its time.
_TIMEOUT_S = 600.0
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3


class DeviceTransfers:
    """Copies into ``tensors``, which are on devices of one kind, for the time of a ``with`` block.

    ``target`` gives the target of one of them, and ``ring`` the buffers to read into. The block
    begins and ends in the training thread, and leaving it waits for all copies. Raises what the
    device raises, StorageError if there is no memory for the ring, and StateError if copies are not
    done within ``timeout_s``. ``clock`` and ``pause`` count in seconds.
    """

    def __init__(
        self,
        device: Device,
        tensors: Iterable[Tensor],
        *,
        read_bytes: int,
        timeout_s: float = _TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._device = device
        self._reads_fit = buffer_bytes(read_bytes) <= LARGEST_BUFFER_BYTES
        self._buffer_bytes = min(buffer_bytes(read_bytes), LARGEST_BUFFER_BYTES)
        self._timeout_s = timeout_s
        self._clock = clock
        self._pause = pause
        self._lock = threading.Lock()  # one call of the device at a time
        self._prepared = threading.local()
        self._lanes: dict[torch.device, _Lane] = {}
        self.ring: PinnedRing  # within the block
        for tensor in tensors:
            index = device.owner(tensor)
            assert index is not None, "a tensor in host memory"
            lane = self._lanes.setdefault(index, _Lane(self, device, index))
            lane.tensors.append(tensor.detach())

    def __enter__(self) -> DeviceTransfers:
        self._prepared.yes = True  # the training thread
        self.ring = PinnedRing(self._device, buffer_bytes=self._buffer_bytes)
        try:
            for lane in self._lanes.values():
                lane.begin()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        problem = self._end()
        if problem is not None and error is None:
            raise problem
        if problem is not None:
            logger.debug("copies to a device failed as well", exc_info=problem)

    @property
    def buffers(self) -> Buffers | None:
        """What is read into: the ring, or None if reads are too large for it. Pieces of what was
        read elsewhere go through the ring."""
        return self.ring if self._reads_fit else None

    def reach(self, tensor: Tensor) -> bool:
        """Whether a tensor is on one of the devices."""
        return self._device.owner(tensor) in self._lanes

    def target(
        self, tensor: Tensor, *, part: Box, shape: tuple[int, ...], dtype: torch.dtype
    ) -> DeviceTarget:
        """Where bytes of a saved chunk of ``shape`` and ``dtype`` go, whose ``part`` is ``tensor``.

        Training thread, within the block.
        """
        index = self._device.owner(tensor)
        assert index is not None
        first, end = part.span_in(shape)
        is_flat = end - first == part.num_elements and tensor.dtype == dtype and is_plain(tensor)
        lane, tensor = self._lanes[index], tensor.detach()
        if is_flat:
            return FlatTarget(self, lane, tensor, first * tensor.element_size())
        lane.need_staging(self._buffer_bytes)
        return StridedTarget(self, lane, tensor, part, shape, dtype)

    # ---- any thread

    def prepare_thread(self) -> None:
        """Make the calling thread one that may use the device."""
        if not getattr(self._prepared, "yes", False):
            self._device.prepare_thread()
            self._prepared.yes = True

    def queue(self, lane: _Lane, batches: Sequence[Sequence[Pair]]) -> Wait:
        """Queue copies, nobody else's in between; returns what waits for them."""
        self.prepare_thread()
        with self._lock:
            return partial(self.wait_for, lane, lane.copy(batches))

    def wait_for(self, lane: _Lane, event: Event) -> None:
        """Return once the event has happened; raises StateError if it does not in time."""
        self.prepare_thread()
        until_s, pause_s = self._clock() + self._timeout_s, _FIRST_PAUSE_S
        while not self._is_done(event):
            if self._clock() >= until_s:
                raise StateError(
                    f"copying to {lane.index} did not finish within {self._timeout_s:.0f} s: work "
                    "that was queued there before takes longer, or the device hangs. Wait for "
                    f"that work before you restore (torch.accelerator.synchronize())"
                )
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _is_done(self, event: Event) -> bool:
        with self._lock:
            return self._device.is_done(event)

    # ---- the end

    def _end(self) -> Exception | None:
        """Order and wait for all copies, and give the ring back; the first problem, if any."""
        problems: list[Exception] = []
        over = False
        try:
            for lane in self._lanes.values():
                try:
                    lane.end()
                except Exception as error:
                    problems.append(error)
            over = all(lane.is_over for lane in self._lanes.values())
        finally:  # also after an interrupt, which leaves copies running
            self.ring.close() if over else self.ring.abandon()
        return problems[0] if problems else None


class _Lane:
    """The copies to one device, in the order of its side stream.

    ``is_over``: no copy is running, nor will one.
    """

    def __init__(self, transfers: DeviceTransfers, device: Device, index: torch.device) -> None:
        self.index = index
        self.tensors: list[Tensor] = []
        self.is_over = True
        self._transfers = transfers
        self._device = device
        self._side: Stream = None
        self._staging: Tensor | None = None
        self._latest: Event | None = None  # behind all copies but those queued since, if any
        self._has_unmarked = False

    def begin(self) -> None:
        """Training thread: what is queued from now on comes after what the script has queued."""
        self._side = self._device.side_stream(self.index)
        self._follow()

    def need_staging(self, num_bytes: int) -> None:
        """Training thread: have device memory for ``through_staging``."""
        if self._staging is None:  # of the current stream, whose work on it may not be over
            self._staging = self._device.allocate(num_bytes, self.index)
            self._follow()

    def _follow(self) -> None:
        device = self._device
        device.wait(self._side, device.record(device.current_stream(self.index)))

    def copy(self, batches: Sequence[Sequence[Pair]]) -> Event:
        """Queue copies, under the lock, and return the event behind them."""
        self.is_over, self._has_unmarked = False, True
        for pairs in batches:
            self._device.copy(pairs, stream=self._side)
        return self._mark()

    def through_staging(self, num_bytes: int) -> Tensor:
        """Device memory that is free once the copies queued before have run."""
        assert self._staging is not None
        return self._staging[:num_bytes]

    def end(self) -> None:
        """Training thread: have what it queues next come after all copies, and wait for them."""
        device = self._device
        if self._side is None:
            return
        try:
            last = self._mark()
            device.wait(device.current_stream(self.index), last)
        finally:
            self._wait_for_all()
        device.return_stream(self._side)

    def _mark(self) -> Event:
        self._latest = self._device.record(self._side)
        self._has_unmarked = False
        return self._latest

    def _wait_for_all(self) -> None:
        if self._has_unmarked:  # the device refused to say when they are done
            self._keep()
            return
        try:
            if self._latest is not None:
                self._transfers.wait_for(self, self._latest)
        except BaseException as error:
            # After an error of its own a device runs nothing; after our deadline it may.
            self.is_over = isinstance(error, Exception) and not isinstance(error, StateError)
            if not self.is_over:
                self._keep()
            raise
        self.is_over = True

    def _keep(self) -> None:
        """Have the allocator keep what copies may still write to, once its owner frees it."""
        kept = [*self.tensors] if self._staging is None else [*self.tensors, self._staging]
        self._device.keep(kept, stream=self._side)


class DeviceTarget(ABC):
    """See Target: bytes of one live tensor, or of a part of it, on its device."""

    def __init__(self, transfers: DeviceTransfers, lane: _Lane) -> None:
        self._transfers = transfers
        self._lane = lane

    def put(self, start: int, data: memoryview) -> Wait | None:
        """See Target. ``start`` and the length are multiples of the element's size."""
        if not len(data):
            return None
        host = None if data.readonly else torch.frombuffer(data, dtype=torch.uint8)
        if host is None or not self._transfers.ring.holds(host.data_ptr()):
            self._put_through_ring(start, data)
            return None
        return self._queue(start, host)

    def _put_through_ring(self, start: int, data: memoryview) -> None:
        """Bytes that lie in other memory, which is not pinned, or not ours to read from later."""
        ring = self._transfers.ring
        for at in range(0, len(data), ring.buffer_bytes):
            piece = data[at : at + ring.buffer_bytes]
            view = ring.take()
            waits: list[Wait] = []
            try:
                view[: len(piece)] = piece
                host = torch.frombuffer(view[: len(piece)], dtype=torch.uint8)
                waits.append(self._queue(start + at, host))
            finally:
                ring.give(view, waits)

    def _queue(self, start: int, host: Tensor) -> Wait:
        return self._transfers.queue(self._lane, self._batches(start, host))

    @abstractmethod
    def _batches(self, start: int, host: Tensor) -> list[list[Pair]]:
        """Copies, in order, of bytes in a buffer."""


class FlatTarget(DeviceTarget):
    """A tensor whose bytes lie as in the file, from byte ``begin`` of the chunk on."""

    def __init__(self, transfers: DeviceTransfers, lane: _Lane, tensor: Tensor, begin: int) -> None:
        super().__init__(transfers, lane)
        self._begin = begin
        self._bytes = tensor.view(-1).view(torch.uint8)

    def _batches(self, start: int, host: Tensor) -> list[list[Pair]]:
        at = start - self._begin
        return [[(self._bytes[at : at + host.numel()], host)]]


class StridedTarget(DeviceTarget):
    """Any other: elements are put in place by the device, from a buffer there."""

    def __init__(
        self,
        transfers: DeviceTransfers,
        lane: _Lane,
        tensor: Tensor,
        part: Box,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(transfers, lane)
        self._tensor = tensor
        self._part = part
        self._shape = shape
        self._dtype = dtype

    def _batches(self, start: int, host: Tensor) -> list[list[Pair]]:
        item_bytes = self._dtype.itemsize
        assert start % item_bytes == host.numel() % item_bytes == 0, "a piece splits an element"
        staging = self._lane.through_staging(host.numel())
        pairs = parts_of(
            staging.view(self._dtype),
            start // item_bytes,
            shape=self._shape,
            part=self._part,
            target=self._tensor,
        )
        return [[(staging, host)], [_by_bits(*pair) for pair in pairs]]


def _by_bits(target: Tensor, source: Tensor) -> Pair:
    """The same copy as one of bits, where it is one."""
    is_changed = target.is_conj() or target.is_neg() or target.dtype != source.dtype
    return (target, source) if is_changed else (as_bits(target), as_bits(source))


@contextmanager
def transfers_to(tensors: Sequence[Tensor], *, read_bytes: int) -> Iterator[DeviceTransfers | None]:
    """Transfers to those of the tensors that are on accelerators; None if none is.

    For reads of ``read_bytes``. Raises StateError for accelerators of several kinds, and what
    DeviceTransfers raises.
    """
    found = [(tensor, device) for tensor in tensors if (device := owner_of(tensor)) is not None]
    devices = {id(device): device for _, device in found}
    if len(devices) > 1:
        raise StateError(
            "live tensors are on accelerators of several kinds; expected one kind beside the CPU. "
            "Move the tensors to one of them"
        )
    if not found:
        yield None
        return
    with DeviceTransfers(
        found[0][1],
        [tensor for tensor, _ in found],
        read_bytes=read_bytes,
    ) as transfers:
        yield transfers
