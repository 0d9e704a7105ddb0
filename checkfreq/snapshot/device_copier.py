"""The copies of one snapshot on one device: which stream runs them, and in which order.

The compute stream is the one that is current at the boundary; each copier has one side stream.

* The compute stream first waits for what is queued on the streams that updated weights since the
  snapshot before, and these wait for its copies in turn: a loop may train on a stream of its own.
* Small tensors and volatile ones are copied on the compute stream, so they are copied before
  anything that training queues next: small ones into a staging buffer, large ones directly.
* Then the side stream waits for the compute stream, transfers the staging buffer to the slot, and
  copies the large settled tensors from their own storage. The next weight update waits for that.
* Small tensors that do not all fit the staging buffer go through it in rounds: on the compute
  stream until the last volatile one is staged, the others on the side stream.
* A device snapshot copies all tensors to a buffer on the device first, and the update waits for
  that only.

Staging buffers are reused, so a snapshot first waits, on the device, for the previous one. No
memory is allocated for which PyTorch's allocator would have to give back what it has cached, since
it waits for the device then: the staging buffer is smaller where there is no room for all of it,
and without one tensors are copied one by one, strided ones in pieces that are too small to matter.
Only the few bytes in which the watch over settled tensors reads are asked for once in any case;
without them, all tensors count as volatile.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from checkfreq.snapshot.arena import Slot
from checkfreq.snapshot.device import Device, Event, Pair, Stream
from checkfreq.snapshot.device_memory import DeviceRoom
from checkfreq.snapshot.device_watch import BUFFER_BYTES, DeviceWatch
from checkfreq.snapshot.engine import Copy
from checkfreq.snapshot.packing import (
    ALIGNMENT,
    Group,
    Packed,
    Packing,
    Round,
    chunked,
    cut,
    is_plain,
    pieces_of,
    target_and_source,
    uncrossing_pieces,
)
from checkfreq.snapshot.watch import watches_over
from checkfreq.types import SnapshotPlace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the memory that is used for copies, on the size of transfers, and on waits.

    small_bytes: tensors up to this size are packed: one transfer each would cost more to start
        (8 to 10 us) than to run.
    staging_bytes: the most that is packed at a time.
    transpose_bytes: strided tensors become row-major through a buffer of this size, in pieces; in
        pieces of small_bytes where there is no room for it.
    chunk_bytes: transfers from the device buffer are split after this many bytes, so that
        training's own transfers need not wait long for the copy engine.
    reserve_bytes: device memory that a device snapshot must leave free when training needs most.
    at_once_bytes: settled host tensors of no more than this in all (0.1 ms) are copied while
        training waits: to hand them to a thread costs more.
    """

    small_bytes: int = 256 << 10
    staging_bytes: int = 32 << 20
    transpose_bytes: int = 32 << 20
    chunk_bytes: int = 32 << 20
    reserve_bytes: int = 512 << 20
    at_once_bytes: int = 1 << 20


@dataclass(slots=True, eq=False)
class Transfer:
    """What one snapshot has in flight on one copier; it holds all of this until ``end``."""

    start: Event
    others: Sequence[Stream] = ()  # weights were updated on these, and may be again
    piece_bytes: int = 0
    end: Event = None
    buffered: Event = None  # a device snapshot is complete in its buffer
    copies: Sequence[Copy] = ()
    kept: list[Tensor] = field(default_factory=list)
    watch: DeviceWatch | None = None

    def changed(self, slot: Slot) -> list[str]:
        """Settled tensors that changed while they were copied; helper thread, after ``end``."""
        return [] if self.watch is None else self.watch.changed(slot)


class _Scratch:
    """Device memory that is kept for the next snapshot, and replaced where it is too small."""

    def __init__(self, allocate: Callable[[int], Tensor | None]) -> None:
        self._allocate = allocate
        self._tensor: Tensor | None = None

    def at_least(self, num_bytes: int, transfer: Transfer) -> Tensor | None:
        """Memory of that size; None if there is no room for it."""
        old = self._tensor
        if old is not None:
            transfer.kept.append(old)  # if it is replaced, copies may still be reading it
            if old.numel() >= num_bytes:
                return old
        new = self._allocate(num_bytes)
        if new is not None:
            self._tensor = new
        return new


class DeviceCopier:
    """Queues snapshots on one device; ``finish`` may run in any thread."""

    def __init__(self, device: Device, index: torch.device, *, limits: Limits) -> None:
        self.index = index
        self._device = device
        self._side = device.side_stream(index)
        self._limits = limits
        self._is_closed = False
        self.room = DeviceRoom(device, index, reserve_bytes=limits.reserve_bytes)
        self._staged: Packed | None = None
        self._transpose_buffer = _Scratch(self._allocate)
        self._read: Event | None = None  # the latest settled tensors have been read
        self._end: Event | None = None  # the staging and device buffers are free again
        self._waits: deque[tuple[Event, Event]] = deque()  # events around each wait queued
        self._wait_s = 0.0
        self._has_watched = False
        self._lock = threading.Lock()  # guards those below, used by the helper thread too
        self._buffer: Packed | None = None
        self._watch_buffers: list[tuple[Tensor, Tensor]] = []

    # ---- training thread

    @property
    def wait_s(self) -> float:
        """How long the compute stream has waited for copies, as far as known now."""
        self._measure()
        return self._wait_s

    def begin(self, updating: Iterable[Stream]) -> Transfer:
        """A new transfer, after the previous snapshot and what is queued on ``updating`` so far."""
        self._measure()
        stream = self._device.current_stream(self.index)
        others = [other for other in updating if other != stream]
        for other in others:
            self._device.wait(stream, self._device.record(other))
        if self._end is not None and self._wait(stream, self._end):
            self._end = None
        return Transfer(start=self._device.record(stream), others=others)

    def enqueue(
        self,
        transfer: Transfer,
        copies: Sequence[Copy],
        base: Tensor,
        *,
        piece_bytes: int,
        place: SnapshotPlace,
    ) -> None:
        """Queue the copies of this device's tensors into the slot (``base``, `[N] uint8`).

        No copy into the slot crosses a multiple of ``piece_bytes``, where its registrations meet.
        """
        copies = self._watchable(copies)
        transfer.copies, transfer.piece_bytes = copies, piece_bytes
        packed = self._packed_in_buffer(copies) if place is SnapshotPlace.DEVICE else None
        if packed is None:
            self._to_host(transfer, copies, base)
        else:
            transfer.kept.append(packed.memory)
            self._through_buffer(transfer, packed, copies, base)
        stream = self._device.current_stream(self.index)
        for other in transfer.others:  # it may write to volatile tensors next
            self._device.wait(other, self._device.record(stream))

    def abandon(self, transfer: Transfer) -> None:
        """Queuing failed halfway: have ``end`` come after everything that was queued."""
        stream = self._device.current_stream(self.index)
        self._device.wait(self._side, self._device.record(stream))
        transfer.end = self._end = self._device.record(self._side)

    def close(self) -> None:
        """No snapshot is in flight, and none follows; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._drop_buffer()
            self._device.return_stream(self._side)

    def fence(self) -> None:
        """Have what is queued next on the current stream wait for the copy of settled tensors."""
        if self._read is not None:
            stream = self._device.current_stream(self.index)
            # Until it has happened the event is kept: the next update may run on a different
            # stream, which has to wait as well.
            if self._wait(stream, self._read):
                self._read = None

    def _wait(self, stream: Stream, event: Event) -> bool:
        """Have ``stream`` wait, and measure how long; True if the event had happened already."""
        if self._device.is_done(event):
            return True
        before = self._device.record(stream)
        self._device.wait(stream, event)
        self._waits.append((before, self._device.record(stream)))
        return False

    def _measure(self) -> None:
        if self._waits and self._device.is_capturing():
            return  # querying an event would break the capture
        while self._waits and self._device.is_done(self._waits[0][1]):
            self._wait_s += self._device.elapsed_s(*self._waits.popleft())

    # ---- host snapshots

    def _to_host(self, transfer: Transfer, copies: Sequence[Copy], base: Tensor) -> None:
        device, side = self._device, self._side
        stream = device.current_stream(self.index)
        small, large = _split(copies, self._limits.small_bytes)
        packed = self._packed_in_staging(small) if small else None
        early: Sequence[Round] = ()
        late: Sequence[Round] = ()
        if packed is None:
            large = [*copies]
        else:
            transfer.kept.append(packed.memory)
            early, late = packed.by_stream()
        for number, one in enumerate(early):
            if number:
                self._unpack(transfer, early[number - 1], base, stream)
            self._pack((*one.volatile, *one.settled), small, stream)
        volatile = [copy for copy in large if not copy.settled]
        settled = [copy for copy in large if copy.settled]
        if volatile:
            device.copy(self._direct(volatile, base, transfer), stream=stream)
        pairs = self._direct(settled, base, transfer)
        settled += [small[n] for one in late for group in one.settled for n in group.numbers]
        self._read_first(transfer, settled, stream)
        # Memory allocated so far belongs to the compute stream: its earlier users must have
        # finished, and the small tensors must be staged, before the side stream goes on.
        device.wait(side, device.record(stream))
        if early:
            self._unpack(transfer, early[-1], base, side)
        if settled:
            device.keep([copy.source for copy in settled], stream=side)
            for one in late:
                self._pack(one.settled, small, side)
                self._unpack(transfer, one, base, side)
            device.copy(pairs, stream=side)
            self._read_again(transfer)
            self._read = device.record(side)
            self._fetch_readings(transfer)
        transfer.end = self._end = device.record(side)

    def _packed_in_staging(self, small: Sequence[Copy]) -> Packed | None:
        """The rounds through the staging buffer; None if the device has no room even for a part."""
        if self._staged is None or not self._staged.fits(small):
            held = None if self._staged is None else self._staged.memory
            memory = self._staging_for(Packing.of(small).num_bytes, held)
            self._staged = None if memory is None else Packed(small, memory)
        return self._staged

    def _staging_for(self, num_bytes: int, held: Tensor | None) -> Tensor | None:
        """Memory for so many bytes, or for as many as there is room for, or what is held."""
        num_bytes = min(num_bytes, self._limits.staging_bytes)
        least = min(num_bytes, self._limits.small_bytes + ALIGNMENT)
        while held is None or held.numel() < num_bytes:
            if (new := self._allocate(num_bytes)) is not None:
                return new
            if num_bytes == least:
                break
            num_bytes = max(num_bytes // 4, least)
        return held if held is not None and held.numel() >= least else None

    def _pack(self, groups: Sequence[Group], copies: Sequence[Copy], stream: Stream) -> None:
        for group in groups:
            sources = group.sources(copies)
            if group.is_alike:
                self._device.pack(group.targets, sources, stream=stream)
            else:
                self._device.copy([*zip(group.targets, sources, strict=True)], stream=stream)

    def _unpack(self, transfer: Transfer, one: Round, base: Tensor, stream: Stream) -> None:
        chunks = chunked(one, base, self._limits.chunk_bytes, piece_bytes=transfer.piece_bytes)
        self._device.copy(chunks, stream=stream)

    def _direct(self, copies: Sequence[Copy], base: Tensor, transfer: Transfer) -> list[Pair]:
        """Copies that read the tensors' own storage; may allocate on the compute stream."""
        pairs: list[Pair] = []
        for copy in copies:
            if is_plain(copy.source):
                target, source = target_and_source(copy, base, copy.offset)
                pairs += cut(target, source, at=copy.offset, piece_bytes=transfer.piece_bytes)
            else:
                pairs += self._transposed(copy, base, transfer)
        return pairs

    def _transposed(self, copy: Copy, base: Tensor, transfer: Transfer) -> list[Pair]:
        """Piece by piece through one buffer, which the order of the stream makes safe to reuse."""
        limits = self._limits
        num_bytes = min(limits.transpose_bytes, copy.num_bytes)
        buffer = self._transpose_buffer.at_least(num_bytes, transfer)
        if buffer is None:  # the device makes each piece row-major, in memory of its own
            pieces = uncrossing_pieces(copy, limits.small_bytes, piece_bytes=transfer.piece_bytes)
            return [target_and_source(piece, base, piece.offset) for piece in pieces]
        pairs: list[Pair] = []
        for piece in pieces_of(copy, limits.transpose_bytes):
            pairs.append(target_and_source(piece, buffer, 0))
            target = base[piece.offset : piece.offset + piece.num_bytes]
            in_buffer = buffer[: piece.num_bytes]
            pairs += cut(target, in_buffer, at=piece.offset, piece_bytes=transfer.piece_bytes)
        return pairs

    def _allocate(self, num_bytes: int, *, at_any_rate: bool = False) -> Tensor | None:
        """Memory of the device; None if none is to be had at once (``at_any_rate``: at all)."""
        if not (at_any_rate or self.room.has(num_bytes)):
            return None
        try:
            return self._device.allocate(num_bytes, self.index)
        except (torch.OutOfMemoryError, MemoryError):
            return None

    # ---- device snapshots

    def _through_buffer(
        self, transfer: Transfer, packed: Packed, copies: Sequence[Copy], base: Tensor
    ) -> None:
        device, side = self._device, self._side
        stream = device.current_stream(self.index)
        (only,) = packed.rounds
        # Volatile tensors on the compute stream, since training may change them with whatever it
        # queues next; settled ones beside it, since nothing does before the fence.
        self._pack(only.volatile, copies, stream)
        settled = [copy for copy in copies if copy.settled]
        self._read_first(transfer, settled, stream)
        device.wait(side, device.record(stream))
        if settled:
            device.keep([copy.source for copy in settled], stream=side)
            self._pack(only.settled, copies, side)
            self._read_again(transfer)
            self._read = device.record(side)
        transfer.buffered = self._read if settled else device.record(side)
        self._unpack(transfer, only, base, side)
        self._fetch_readings(transfer)
        transfer.end = self._end = device.record(side)

    def _packed_in_buffer(self, copies: Sequence[Copy]) -> Packed | None:
        """The copies in the buffer for a device snapshot; None if the device has no room for it."""
        packed = self._buffer
        if packed is None or not packed.fits(copies):
            memory = self._memory_for(Packing.of(copies).num_bytes)
            packed = None if memory is None else Packed(copies, memory)
            with self._lock:
                self._buffer = packed
        return packed

    def _memory_for(self, num_bytes: int) -> Tensor | None:
        # Dropped before the allocation, which may need its memory; a transfer that still uses it
        # keeps it alive.
        with self._lock:
            held, self._buffer = self._buffer, None
        if held is not None and held.memory.numel() >= num_bytes:
            return held.memory
        del held
        memory = None
        if self.room.grants(num_bytes) and (memory := self._allocate(num_bytes)) is None:
            self.room.give_up()  # the room was not there
        return memory

    # ---- the watch over settled tensors

    def _watchable(self, copies: Sequence[Copy]) -> Sequence[Copy]:
        """``copies``; all of them volatile if nothing would see a write to settled ones."""
        if not any(copy.watched for copy in copies) or self._has_watch_buffers():
            return copies
        return [copy._replace(settled=False) for copy in copies]

    def _read_first(self, transfer: Transfer, settled: Sequence[Copy], stream: Stream) -> None:
        if watched := watches_over(settled):
            with self._lock:
                buffers = self._watch_buffers.pop()
            transfer.watch = DeviceWatch(watched, *buffers)
            self._device.copy(transfer.watch.reading(second=False), stream=stream)

    def _read_again(self, transfer: Transfer) -> None:
        if transfer.watch is not None:
            self._device.copy(transfer.watch.reading(second=True), stream=self._side)

    def _fetch_readings(self, transfer: Transfer) -> None:
        if transfer.watch is not None:
            self._device.copy(transfer.watch.fetch(), stream=self._side)

    def _has_watch_buffers(self) -> bool:
        """Whether there are buffers on the device and on the host, new ones if none are left."""
        with self._lock:
            if self._watch_buffers:
                return True
        # Asked for once even if it is not known whether there is room: a run keeps these few bytes.
        is_first, self._has_watched = not self._has_watched, True
        on_device = self._allocate(BUFFER_BYTES, at_any_rate=is_first)
        if on_device is None:
            if is_first:
                logger.warning(
                    "%s: no room for %d bytes in which to watch over settled tensors. Without "
                    "them, training waits on the device for each snapshot to be copied",
                    self.index,
                    BUFFER_BYTES,
                )
            return False
        with self._lock:
            self._watch_buffers.append((on_device, self._device.allocate_host(BUFFER_BYTES)))
        return True

    # ---- any thread

    def finish(self, transfer: Transfer, *, place: SnapshotPlace) -> None:
        """Drop the sources and take the buffers back, after ``transfer.end``."""
        if transfer.watch is not None:
            with self._lock:
                self._watch_buffers.append((transfer.watch.buffer, transfer.watch.host))
        transfer.watch = None
        transfer.copies = ()
        transfer.kept.clear()
        if place is SnapshotPlace.HOST:
            self._drop_buffer()

    def spare_bytes(self) -> int | None:
        """What a device snapshot may use here, as of the latest look; None if that is unknown."""
        buffer = self._buffer
        return self.room.spare_bytes(0 if buffer is None else buffer.memory.numel())

    # ---- helper thread

    def look(self) -> None:
        """Find out how much memory there is, and give the buffer back if training needs it."""
        self.room.look()
        if self._buffer is not None and self.room.is_short():
            self._drop_buffer()

    def watch(self) -> None:
        """Give the buffer back if training ran short of memory since it was granted."""
        if self._buffer is not None and self.room.has_run_short():
            self._drop_buffer()

    @property
    def has_buffer(self) -> bool:
        """Whether memory is held between snapshots."""
        return self._buffer is not None

    def _drop_buffer(self) -> None:
        with self._lock:  # freed once the snapshots that still use it have finished
            self._buffer = None


def _split(copies: Sequence[Copy], small_bytes: int) -> tuple[list[Copy], list[Copy]]:
    """Copies that are packed, and those that are transferred one by one."""
    small: list[Copy] = []
    large: list[Copy] = []
    for copy in copies:
        (small if copy.num_bytes <= small_bytes else large).append(copy)
    return small, large
