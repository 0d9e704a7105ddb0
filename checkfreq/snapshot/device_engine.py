"""Phase one on accelerators, ordered by streams and events so that the host waits for no device.

``start`` queues all copies and returns. What training queues next runs after the copies of volatile
tensors. ``fence`` queues a wait on the device. A helper thread waits for the last event of each
snapshot, keeps the source tensors alive until then, and reports the end. Several snapshots may be
in flight, each in its own slot. The order on one device is in device_copier.py.

Host tensors beside them are left to a HostEngine if they are settled and large: its thread copies
those of one snapshot, and ``fence`` blocks until it has. All others have been copied when ``start``
returns.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from checkfreq import faults
from checkfreq.errors import StateError
from checkfreq.snapshot.arena import Slot
from checkfreq.snapshot.backends import UpdateStreams
from checkfreq.snapshot.device import Device
from checkfreq.snapshot.device_copier import DeviceCopier, Limits, Transfer
from checkfreq.snapshot.engine import Copy, HostEngine, OnCopied, copy_to_slot
from checkfreq.snapshot.watch import require_unchanged
from checkfreq.types import SnapshotPlace

logger = logging.getLogger(__name__)

#: How soon training gets device memory back after it ran short. Asking takes some 0.1 ms.
_WATCH_EVERY_S = 1.0


class Helper(Protocol):
    """Runs tasks in order, off the training thread."""

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` after those submitted before."""
        ...

    def close(self, *, timeout_s: float) -> bool:
        """Finish all tasks; False if they were not finished at the deadline. Idempotent."""
        ...


class HelperThread:
    """A daemon thread that starts with the first task.

    Between tasks it calls ``watch`` every so often; a return of False means: not before the next.
    """

    def __init__(
        self,
        *,
        prepare: Callable[[], None],
        watch: Callable[[], bool] = lambda: False,
        watch_every_s: float = _WATCH_EVERY_S,
    ) -> None:
        self._prepare = prepare
        self._watch = watch
        self._watch_every_s = watch_every_s
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], None]) -> None:
        """See Helper."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkfreq-copied", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def close(self, *, timeout_s: float) -> bool:
        """See Helper."""
        if self._thread is None:
            return True
        self._tasks.put(None)
        self._thread.join(timeout_s)
        finished = not self._thread.is_alive()
        self._thread = None
        return finished

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception:  # tasks still work; only a graph capture may break
            logger.exception("cannot prepare the snapshot helper thread")
        is_watching = True
        while True:
            try:
                task = self._tasks.get(timeout=self._watch_every_s if is_watching else None)
            except queue.Empty:
                is_watching = self._watched()
                continue
            if task is None:
                return
            is_watching = True
            try:
                task()
            except Exception:  # the next snapshot still needs this thread
                logger.exception("a snapshot's helper task failed")

    def _watched(self) -> bool:
        try:
            return self._watch()
        except Exception:  # a broken device, which the next snapshot reports
            logger.exception("cannot tell whether training has run short of device memory")
            return False


@dataclass(slots=True, eq=False)
class _InFlight:
    """A snapshot that was started and has not ended."""

    slot: Slot
    on_copied: OnCopied
    error: BaseException | None = None
    transfers: list[tuple[DeviceCopier, Transfer]] = field(default_factory=list)
    host_copied: threading.Event | None = None  # of host tensors that are left to a thread
    host_s: float | None = None  # how long these took


class DeviceEngine:
    """Snapshots of tensors on accelerators and of host tensors among them; see SnapshotEngine.

    ``place`` may be changed between snapshots. A device snapshot that would not leave
    ``limits.reserve_bytes`` of device memory when training needs most is taken to the host instead.
    ``weighs_places``: a place in device memory may be chosen, so its room is looked at after each
    snapshot. ``streams``: where weights were updated.
    """

    fence_on_device = True

    def __init__(
        self,
        device: Device,
        *,
        place: SnapshotPlace = SnapshotPlace.HOST,
        limits: Limits | None = None,
        close_timeout_s: float = 60.0,
        helper: Helper | None = None,
        weighs_places: bool = True,
        streams: UpdateStreams | None = None,
    ) -> None:
        self.place = place
        self.last_copy_s: float | None = None
        self.last_device_copy_s: float | None = None
        self._device = device
        self._limits = limits or Limits()
        self._close_timeout_s = close_timeout_s
        self._weighs_places = weighs_places
        self._streams = streams or UpdateStreams()
        self._helper = helper or HelperThread(prepare=device.prepare_thread, watch=self._watch)
        self._host = HostEngine()
        self._copiers: dict[torch.device, DeviceCopier] = {}
        self._changed = threading.Condition()
        self._num_active = 0

    @property
    def device_wait_s(self) -> float:
        """How long compute streams have waited for copies, as far as known now."""
        return sum(copier.wait_s for copier in self._copiers.values())

    # ---- training thread

    def look_at(self, devices: Iterable[torch.device]) -> None:
        """See SnapshotEngine."""
        if not self._device.is_capturing():
            for device in devices:
                self._helper.submit(self._copier(device).look)

    def spare_bytes(self, device: torch.device) -> int | None:
        """See SnapshotEngine."""
        copier = self._copiers.get(device)
        return None if copier is None else copier.spare_bytes()

    def start(self, copies: Sequence[Copy], slot: Slot, *, on_copied: OnCopied) -> None:
        """See SnapshotEngine. An error voids the slot, and ``on_copied`` gets it."""
        snapshot = _InFlight(slot, on_copied)
        with self._changed:  # counted before anything is queued, or `wait_copied` could miss it
            self._num_active += 1
        try:
            self._queue(snapshot, copies)
        except BaseException as error:
            snapshot.error = error
            self._abandon(snapshot)
            if not isinstance(error, Exception):
                raise
        finally:
            if snapshot.transfers or snapshot.host_copied is not None:
                self._helper.submit(lambda: self._finish(snapshot))
            else:
                self._finish(snapshot)

    def fence(self, *, timeout_s: float) -> float:
        """See SnapshotEngine. The current streams wait; the host does for host tensors only."""
        waited_s = self._host.fence(timeout_s=timeout_s)
        if self._copiers and not self._device.is_capturing():
            for copier in self._copiers.values():
                copier.fence()
        return waited_s

    def wait_copied(self, *, timeout_s: float) -> bool:
        """See SnapshotEngine."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_active == 0, timeout_s)

    def close(self) -> None:
        """See SnapshotEngine."""
        self._host.close()
        if not self._helper.close(timeout_s=self._close_timeout_s):
            logger.error(
                "a snapshot copy did not finish within %.0f s; the device may hang",
                self._close_timeout_s,
            )
            return
        for copier in self._copiers.values():
            copier.close()

    def _queue(self, snapshot: _InFlight, copies: Sequence[Copy]) -> None:
        if self._device.is_capturing():
            raise StateError(
                "an iteration boundary was passed while a CUDA graph is being captured; "
                "expected step() outside of the capture"
            )
        faults.reach("snapshot.copy_start")
        base = torch.frombuffer(snapshot.slot.memory, dtype=torch.uint8)
        on_host, by_device = self._sorted_by_owner(copies)
        for index, group in by_device.items():  # first, so that devices copy while the host does
            copier = self._copier(index)
            transfer = copier.begin(self._streams.read(index))
            snapshot.transfers.append((copier, transfer))
            copier.enqueue(
                transfer,
                group,
                base,
                piece_bytes=snapshot.slot.piece_bytes,
                place=self.place,
            )
        settled_bytes = sum([copy.num_bytes for copy in on_host if copy.settled])
        if settled_bytes > self._limits.at_once_bytes:
            self._copy_beside(snapshot, on_host)
        else:
            for copy in on_host:
                copy_to_slot(copy, snapshot.slot)

    def _copy_beside(self, snapshot: _InFlight, copies: Sequence[Copy]) -> None:
        """Have a thread copy the settled ones of these host tensors."""
        start_s, copied = time.perf_counter(), threading.Event()

        def ended(error: BaseException | None) -> None:
            snapshot.error = snapshot.error or error
            snapshot.host_s = time.perf_counter() - start_s
            copied.set()

        self._host.start(copies, snapshot.slot, on_copied=ended)
        snapshot.host_copied = copied

    def _sorted_by_owner(
        self, copies: Sequence[Copy]
    ) -> tuple[list[Copy], dict[torch.device, list[Copy]]]:
        on_host: list[Copy] = []
        by_device: dict[torch.device, list[Copy]] = {}
        for copy in copies:
            owner = self._device.owner(copy.source)
            if owner is None:
                on_host.append(copy)
            elif copy.num_bytes:
                by_device.setdefault(owner, []).append(copy)
        return on_host, by_device

    def _copier(self, index: torch.device) -> DeviceCopier:
        if index not in self._copiers:
            self._copiers[index] = DeviceCopier(self._device, index, limits=self._limits)
        return self._copiers[index]

    def _abandon(self, snapshot: _InFlight) -> None:
        """Have the helper wait for the copies queued so far: they still write to the slot."""
        for copier, transfer in snapshot.transfers:
            if transfer.end is None:
                try:
                    copier.abandon(transfer)
                except Exception:  # the first error is the one to report
                    logger.exception("%s: cannot find the end of a failed snapshot", copier.index)

    # ---- helper thread

    def _finish(self, snapshot: _InFlight) -> None:
        if snapshot.host_copied is not None:
            snapshot.host_copied.wait()
        try:
            self._complete(snapshot)
        except BaseException as error:
            snapshot.error = snapshot.error or error
        copiers = [copier for copier, _ in snapshot.transfers if self._needs_look(copier)]
        self._release(snapshot)  # first: the next snapshot reuses these buffers
        with self._changed:  # before the callback: a thread that waits for the copy waits no longer
            self._num_active -= 1
            self._changed.notify_all()
        snapshot.on_copied(snapshot.error)
        for copier in copiers:  # last: the driver may take its time
            copier.look()

    def _needs_look(self, copier: DeviceCopier) -> bool:
        return self._weighs_places or not copier.room.is_known

    def _watch(self) -> bool:
        """Have copiers give back memory that training needs; whether any still holds some."""
        copiers = [*self._copiers.values()]
        for copier in copiers:
            copier.watch()
        return any(copier.has_buffer for copier in copiers)

    def _release(self, snapshot: _InFlight) -> None:
        for copier, transfer in snapshot.transfers:
            copier.finish(transfer, place=self.place)
        snapshot.transfers.clear()

    def _complete(self, snapshot: _InFlight) -> None:
        if snapshot.error is None:
            faults.reach("snapshot.copy_settled")
        for _, transfer in snapshot.transfers:
            if transfer.end is not None:
                self._device.synchronize(transfer.end)
        if snapshot.error is not None:
            return
        require_unchanged(
            [name for _, transfer in snapshot.transfers for name in transfer.changed(snapshot.slot)]
        )
        transfers, elapsed_s = [one for _, one in snapshot.transfers], self._device.elapsed_s
        on_host_s = [] if snapshot.host_s is None else [snapshot.host_s]
        to_host_s = [elapsed_s(one.start, one.end) for one in transfers]
        buffered_s = [
            elapsed_s(one.start, one.buffered) for one in transfers if one.buffered is not None
        ]
        self.last_copy_s = max(to_host_s + on_host_s, default=None)
        # An update waits for both: a buffer on the device does not shorten the copy on the host.
        self.last_device_copy_s = max(buffered_s + on_host_s) if buffered_s else None
        faults.reach("snapshot.copy_end")
