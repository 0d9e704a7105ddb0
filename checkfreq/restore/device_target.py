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

Bytes are bytes: a dtype matters only where strides are, and there bits are copied, not numbers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from checkfreq.errors import StateError
from checkfreq.restore.buffers import Wait
from checkfreq.restore.pinned_ring import PinnedRing
from checkfreq.snapshot.device import Device, Event, Pair, Stream
from checkfreq.snapshot.packing import as_bits, is_plain, parts_of_range

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
        num_threads: int,
        buffer_bytes: int,
        timeout_s: float = _TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._device = device
        self._num_threads = num_threads
        self._buffer_bytes = buffer_bytes
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

    def __enter__(self) -> Self:
        self._prepared.yes = True  # the training thread
        self.ring = PinnedRing(
            self._device, num_threads=self._num_threads, buffer_bytes=self._buffer_bytes
        )
        try:
            for lane in self._lanes.values():
                lane.begin(self._buffer_bytes)
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

    def target(self, tensor: Tensor) -> DeviceTarget:
        """Where the bytes of one of the tensors go. For use within the block."""
        index = self._device.owner(tensor)
        assert index is not None
        return DeviceTarget(self, self._lanes[index], tensor.detach())

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

    def begin(self, buffer_bytes: int) -> None:
        """Training thread: what is queued from now on comes after what the script has queued."""
        device = self._device
        self._side = device.side_stream(self.index)
        if not all(is_plain(tensor) for tensor in self.tensors):
            self._staging = device.allocate(buffer_bytes, self.index)
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


class DeviceTarget:
    """See Target: the bytes of one live tensor, row by row, on its device."""

    def __init__(self, transfers: DeviceTransfers, lane: _Lane, tensor: Tensor) -> None:
        self._transfers = transfers
        self._lane = lane
        self._tensor = tensor
        self._flat = tensor.view(-1).view(torch.uint8) if is_plain(tensor) else None

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
        if self._flat is not None:
            pairs = [(self._flat[start : start + host.numel()], host)]
            return self._transfers.queue(self._lane, [pairs])
        staging = self._lane.through_staging(host.numel())
        return self._transfers.queue(
            self._lane, [[(staging, host)], self._strided_pairs(start, staging)]
        )

    def _strided_pairs(self, start: int, staging: Tensor) -> list[Pair]:
        tensor, size = self._tensor, self._tensor.element_size()
        assert start % size == staging.numel() % size == 0
        begin, values = start // size, staging.view(tensor.dtype)
        return [
            _without_repeats(part, values[at - begin : at - begin + part.numel()].view(part.shape))
            for at, part in parts_of_range(tensor, begin, begin + values.numel())
        ]


def _without_repeats(target: Tensor, source: Tensor) -> Pair:
    """The views of one copy; expanded dimensions of the target (stride 0) are written once."""
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    if target.is_conj() or target.is_neg():
        return target, source
    return as_bits(target), as_bits(source)
