"""Phase one on accelerators: ordered by streams and events, so that the host never waits.

``start`` queues everything and returns; volatile tensors are then fixed in stream order, host
tensors are copied. ``barrier`` queues a wait on the device. A helper thread waits for the last
event of each snapshot, which it keeps the source tensors alive for, and reports it. Several
snapshots may be in flight, each in its own slot. What happens on one device is in device_copier.py.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from checkfreq import faults
from checkfreq.errors import StateError
from checkfreq.snapshot.arena import Pinner, Slot
from checkfreq.snapshot.device import Device
from checkfreq.snapshot.device_copier import DeviceCopier, Limits, Transfer
from checkfreq.snapshot.engine import Copy, OnCopied, copy_to_slot
from checkfreq.types import SnapshotPlace

logger = logging.getLogger(__name__)


class Helper(Protocol):
    """Runs jobs one after the other, off the training thread."""

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` after those submitted before."""
        ...

    def close(self, *, timeout_s: float) -> bool:
        """Finish all jobs; False if they were not finished at the deadline. Idempotent."""
        ...


class HelperThread:
    """A daemon thread that is started at the first job."""

    def __init__(self, *, prepare: Callable[[], None]) -> None:
        self._prepare = prepare
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """See Helper."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkfreq-copied", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self, *, timeout_s: float) -> bool:
        """See Helper."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        finished = not self._thread.is_alive()
        self._thread = None
        return finished

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception:  # the jobs themselves still work; only a graph capture may be hurt
            logger.exception("cannot prepare the snapshot helper thread")
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # the next snapshot still needs this thread
                logger.exception("a snapshot's helper job failed")


@dataclass(slots=True, eq=False)
class _InFlight:
    slot: Slot
    on_copied: OnCopied
    error: BaseException | None = None
    transfers: list[tuple[DeviceCopier, Transfer]] = field(default_factory=list)


class DeviceEngine:
    """Snapshots of tensors on accelerators, host tensors among them; see SnapshotEngine.

    ``place`` may be changed between snapshots. A device snapshot that would leave
    less than ``limits.reserve_bytes`` of device memory goes to the host instead.
    """

    fence_on_device = True

    def __init__(
        self,
        device: Device,
        *,
        pinner: Pinner | None = None,
        place: SnapshotPlace = SnapshotPlace.HOST,
        limits: Limits | None = None,
        close_timeout_s: float = 60.0,
        helper: Helper | None = None,
    ) -> None:
        self.place = place
        self.last_copy_s: float | None = None
        self.last_device_copy_s: float | None = None
        self._device = device
        self._pinner = pinner or DevicePinner(device)
        self._limits = limits or Limits()
        self._close_timeout_s = close_timeout_s
        self._helper = helper or HelperThread(prepare=device.prepare_thread)
        self._copiers: dict[torch.device, DeviceCopier] = {}
        self._changed = threading.Condition()
        self._num_active = 0

    @property
    def device_wait_s(self) -> float:
        """How long compute streams have waited for copies, as far as it is known yet."""
        return sum(copier.wait_s for copier in self._copiers.values())

    # ---- training thread

    def start(self, copies: Sequence[Copy], slot: Slot, *, on_copied: OnCopied) -> None:
        """See SnapshotEngine. An error voids the slot, and ``on_copied`` gets it."""
        snapshot = _InFlight(slot, on_copied)
        with self._changed:
            self._num_active += 1
        try:
            self._queue(snapshot, copies)
        except BaseException as error:
            snapshot.error = error
            self._abandon(snapshot)
            if not isinstance(error, Exception):
                raise
        finally:
            if snapshot.transfers:
                self._helper.submit(lambda: self._finish(snapshot))
            else:
                self._finish(snapshot)

    def fence(self, *, timeout_s: float) -> float:
        """See SnapshotEngine. The current streams wait, not the host."""
        if self._copiers and not self._device.is_capturing():
            for copier in self._copiers.values():
                copier.fence()
        return 0.0

    def wait_copied(self, *, timeout_s: float) -> bool:
        """See SnapshotEngine."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_active == 0, timeout_s)

    def close(self) -> None:
        """See SnapshotEngine."""
        if not self._helper.close(timeout_s=self._close_timeout_s):
            logger.error(
                "a snapshot copy did not finish within %.0f s; the device may hang",
                self._close_timeout_s,
            )

    def _queue(self, snapshot: _InFlight, copies: Sequence[Copy]) -> None:
        if self._device.is_capturing():
            raise StateError(
                "an iteration boundary was passed while a CUDA graph is being captured; "
                "expected step() outside of the capture"
            )
        faults.reach("snapshot.copy_start")
        self._pin(snapshot.slot)
        base = torch.frombuffer(snapshot.slot.memory, dtype=torch.uint8)
        on_host, by_device = self._sorted_by_owner(copies)
        for index, group in by_device.items():  # first: devices work while the host copies
            copier = self._copier(index)
            transfer = copier.begin()
            snapshot.transfers.append((copier, transfer))
            copier.queue(transfer, group, base, place=self.place)
        for copy in on_host:
            copy_to_slot(copy, snapshot.slot)

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

    def _pin(self, slot: Slot) -> None:
        """Slots made before the state was on a device are not pinned yet."""
        if slot.unpin is None:
            slot.unpin = self._pinner.pin(slot.address, slot.num_bytes)

    def _abandon(self, snapshot: _InFlight) -> None:
        """Queued copies still write to the slot: the helper waits for them before it is void."""
        for copier, transfer in snapshot.transfers:
            if transfer.end is None:
                try:
                    copier.abandon(transfer)
                except Exception:  # the first error is the one to report
                    logger.exception("%s: cannot find the end of a failed snapshot", copier.index)

    # ---- helper thread

    def _finish(self, snapshot: _InFlight) -> None:
        try:
            self._complete(snapshot)
        except BaseException as error:
            snapshot.error = snapshot.error or error
        self._release(snapshot)
        with self._changed:  # first: whoever waits for the copy waits for no hand-over
            self._num_active -= 1
            self._changed.notify_all()
        snapshot.on_copied(snapshot.error)

    def _release(self, snapshot: _InFlight) -> None:
        for copier, transfer in snapshot.transfers:
            try:
                copier.finish(transfer, place=self.place)
            except Exception:  # a broken device: the snapshot's own error is reported already
                logger.exception("%s: cannot tell how much memory is free", copier.index)
        snapshot.transfers.clear()

    def _complete(self, snapshot: _InFlight) -> None:
        if snapshot.error is None:
            faults.reach("snapshot.copy_settled")
        for _, transfer in snapshot.transfers:
            if transfer.end is not None:
                self._device.synchronize(transfer.end)
        if snapshot.error is not None:
            return
        for _, transfer in snapshot.transfers:
            transfer.scatter(snapshot.slot)
        self.last_copy_s = max(
            (
                self._device.elapsed_s(transfer.start, transfer.end)
                for _, transfer in snapshot.transfers
            ),
            default=None,
        )
        self.last_device_copy_s = max(
            (
                self._device.elapsed_s(transfer.start, transfer.buffered)
                for _, transfer in snapshot.transfers
                if transfer.buffered is not None
            ),
            default=None,
        )
        faults.reach("snapshot.copy_end")


class DevicePinner(Pinner):
    """Page-locks slots for an accelerator; without, copies are slower and hold the host."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._failed = False

    def pin(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """See Pinner. A failure is reported once, and not tried again."""
        if self._failed or not self._device.is_in_use():
            return None
        problem = _in_thread(lambda: self._register(address, num_bytes))
        if problem is None:
            return lambda: self._device.unregister_host(address)
        self._failed = True
        logger.warning(
            "cannot pin %.1f MiB of host memory for snapshots: %s. Copies from the device go on "
            "unpinned: they are slower, and step() waits for them. Raise the limit of locked "
            "memory (ulimit -l), or set CFConfig.host_memory_limit",
            num_bytes / 2**20,
            problem,
        )
        return None

    def _register(self, address: int, num_bytes: int) -> str | None:
        self._device.prepare_thread()
        return self._device.register_host(address, num_bytes)


def _in_thread(call: Callable[[], str | None]) -> str | None:
    """Run in a thread of its own: a failed call leaves an error behind in its thread, which
    the training thread would find at its next kernel launch."""
    results: list[str | None] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="checkfreq-pin", daemon=True)
    thread.start()
    thread.join()
    return results[0]
