"""Takes snapshots: plans the layout, prepares the slot, and has an engine copy into it.

The layout is planned at the first boundary and again whenever the structure of the state changes.
The file headers are written to a slot when it is first used with a layout. Belongs to the training
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from xxhash import xxh3_64_hexdigest

from checkfreq.config import CFConfig
from checkfreq.errors import SnapshotError
from checkfreq.snapshot.arena import Arena, Pinner, Slot
from checkfreq.snapshot.backends import backend_in_use, backend_of
from checkfreq.snapshot.device_engine import DeviceEngine
from checkfreq.snapshot.engine import (
    Copy,
    HostEngine,
    OnCopied,
    SnapshotEngine,
    fingerprint,
    make_copy,
    slot_fingerprint,
)
from checkfreq.snapshot.layout import StateLayout
from checkfreq.state.capture import read_local_state
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.collector import CapturedState
from checkfreq.store.gc_pause import gc_paused
from checkfreq.types import FileSpec, SnapshotPlace

logger = logging.getLogger(__name__)


class SlotListener(Protocol):
    """What has to know about slots: ``Persistence``, which tells the worker."""

    def forget_slots(self) -> None:
        """All slots were released; new ones follow."""
        ...

    def share_slot(self, slot: int, *, fd: int, num_bytes: int) -> None:
        """Slot ``slot`` now is this memory."""
        ...

    def lay_out_slot(self, slot: int, files: tuple[FileSpec, ...]) -> None:
        """Slot ``slot`` now has this layout."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A slot that holds the state at one boundary, or will once its copies are done."""

    slot: Slot
    copies: tuple[Copy, ...]
    num_bytes: int


class Snapshotter:
    """Makes room for the state, then copies it.

    ``choose_engine`` is called at the first boundary and not earlier, since a model may be moved to
    a device until then; and again if state that was in host memory has since moved to a device.
    """

    def __init__(
        self,
        *,
        choose_engine: Callable[[], SnapshotEngine],
        arena: Arena,
        listener: SlotListener,
        config: CFConfig,
    ) -> None:
        self._choose_engine = choose_engine
        self._chosen: SnapshotEngine | None = None
        self._arena = arena
        self._listener = listener
        self._config = config
        self._layout: StateLayout | None = None
        self._latest: Snapshot | None = None
        self._expected: dict[str, str] = {}
        #: Bytes of state on each accelerator, as of the last ``make_room``.
        self.device_bytes: dict[torch.device, int] = {}
        #: Layouts planned so far.
        self.num_layouts = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot; 0 before the first layout."""
        return 0 if self._layout is None else self._layout.total_bytes

    @property
    def fence_on_device(self) -> bool:
        """Whether host tensors may change while a copy runs."""
        return self._engine().fence_on_device

    @property
    def device_wait_s(self) -> float:
        """How long devices have waited for copies, as far as known now."""
        return 0.0 if self._chosen is None else self._chosen.device_wait_s

    @property
    def engine(self) -> SnapshotEngine:
        """The engine that takes the snapshots; chosen now if it has not been yet."""
        return self._engine()

    @property
    def layout_digest(self) -> str:
        """A digest of names, dtypes and shapes; "" before the first layout."""
        layout = self._layout
        if layout is None:
            return ""
        return xxh3_64_hexdigest(b"".join(map(layout.header, range(len(layout.files)))))

    def make_room(self, captured: CapturedState) -> bool:
        """Plan the layout and make sure that the slots are large enough.

        False while slots that are too small are still in use.
        """
        has_moved = self._follow_to_device(captured)
        layout = self._layout
        if layout is None or not layout.fits(captured):
            layout = StateLayout.plan(captured)
        if layout.total_bytes > self._arena.slot_bytes:
            if not all(slot.is_free for slot in self._arena.slots):
                return False
            self.allocate(layout.total_bytes)
        if layout is not self._layout or has_moved:
            self.device_bytes = _bytes_by_device(captured, layout)
            self._engine().look_at(self.device_bytes)
        if layout is not self._layout:
            self._layout = layout
            self.num_layouts += 1
        return True

    def allocate(self, state_bytes: int) -> None:
        """Allocate slots; their pages are faulted in by a background thread."""
        self._latest = None  # its slot is about to be unmapped
        self._arena.allocate(state_bytes)
        self._listener.forget_slots()
        for slot in self._arena.slots:
            self._listener.share_slot(slot.index, fd=slot.fd, num_bytes=slot.num_bytes)

    def take(self, captured: CapturedState, slot: Slot, *, on_copied: OnCopied) -> Snapshot:
        """Begin a snapshot into ``slot``, after ``make_room`` with the same state."""
        layout = self._layout
        assert layout is not None
        self._prepare(slot, layout)
        with gc_paused():
            copies = _copies(captured, layout)
        snapshot = Snapshot(slot, copies, layout.total_bytes)
        # Digested before the copy begins: this is what the tensors were at the boundary. Without
        # the option nothing may keep the source tensors alive after the copy.
        if self._config.verify_settled:
            self._latest = snapshot
            self._expected = {c.name: fingerprint(c) for c in copies if c.settled}
        self._engine().start(copies, slot, on_copied=on_copied)
        return snapshot

    def fence(self) -> float:
        """Have the next weight update come after the copy; returns the host's wait in seconds."""
        if self._chosen is None:
            return 0.0
        return self._chosen.fence(timeout_s=self._config.barrier_timeout_s)

    def changed_settled(self) -> list[str]:
        """Settled tensors that changed between a snapshot's boundary and the next update.

        Such a tensor, or its copy, differs from what the tensor was at the boundary. Empty without
        ``CFConfig.verify_settled``, and for all later updates.
        """
        latest, self._latest = self._latest, None
        if latest is None or latest.slot.is_free:
            return []
        if not self._engine().wait_copied(timeout_s=self._config.barrier_timeout_s):
            raise SnapshotError(
                "verify_settled: the snapshot was not finished after "
                f"{self._config.barrier_timeout_s:.0f} s (CFConfig.barrier_timeout_s)"
            )
        return [c.name for c in latest.copies if c.settled and self._has_changed(c, latest.slot)]

    def _has_changed(self, copy: Copy, slot: Slot) -> bool:
        expected = self._expected[copy.name]
        return fingerprint(copy) != expected or slot_fingerprint(copy, slot) != expected

    def close(self) -> None:
        """Finish the copies in progress; idempotent."""
        if self._chosen is not None:
            self._chosen.close()

    def _engine(self) -> SnapshotEngine:
        if self._chosen is None:
            self._chosen = self._choose_engine()
        return self._chosen

    def _follow_to_device(self, captured: CapturedState) -> bool:
        """Choose again if state has moved to a device: the host engine cannot copy it."""
        if self._engine().fence_on_device or all(r.tensor.is_cpu for r in captured.tensors):
            return False
        logger.info("the state has moved to an accelerator: snapshots follow it")
        self.close()
        self._chosen = self._choose_engine()
        return True

    def _prepare(self, slot: Slot, layout: StateLayout) -> None:
        if slot.layout is layout:
            return
        for index, file in enumerate(layout.files):
            header = layout.header(index)
            slot.memory[file.slot_offset : file.slot_offset + len(header)] = header
        self._listener.lay_out_slot(slot.index, layout.files)
        slot.layout = layout


def engine_for(
    chk: CFCheckpoint,
    *,
    pinner: Pinner | None = None,
    place: SnapshotPlace | None = None,
    weighs_places: bool = True,
) -> SnapshotEngine:
    """The engine for the tensors that ``chk`` tracks now, by where they are.

    ``pinner`` page-locks slots that are not pinned yet. ``weighs_places``: without a ``place``, it
    may be changed later. Raises StateError for tensors on a device that no engine supports.
    """
    if backend_in_use() is None:
        return HostEngine()  # what is on no device at all, or has no bytes, capture refuses
    local = read_local_state(chk, positions={}, fence_on_device=True)
    device = backend_of([ref.tensor.device for ref in local.refs])
    if device is None:
        return HostEngine()
    return DeviceEngine(
        device,
        pinner=pinner,
        place=place or SnapshotPlace.HOST,
        weighs_places=place is SnapshotPlace.DEVICE or (place is None and weighs_places),
    )


def _bytes_by_device(captured: CapturedState, layout: StateLayout) -> dict[torch.device, int]:
    found: dict[torch.device, int] = {}
    for ref, (_, num_bytes) in zip(captured.tensors, layout.destinations, strict=True):
        if not ref.tensor.is_cpu:
            device = ref.tensor.device
            found[device] = found.get(device, 0) + num_bytes
    return found


def _copies(captured: CapturedState, layout: StateLayout) -> tuple[Copy, ...]:
    """The captured tensors with their places in the layout, which they fit."""
    places = zip(layout.names, captured.tensors, layout.destinations, strict=True)
    return tuple(
        [
            make_copy(Copy, (name, ref.tensor, offset, num_bytes, ref.settled))
            for name, ref, (offset, num_bytes) in places
        ]
    )
