"""Takes snapshots: plans the layout, prepares the slot, and has an engine copy into it.

The layout is planned at the first boundary and again whenever the structure of the state changes.
The file headers are written to a slot when it is first used with a layout. Belongs to the training
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from xxhash import xxh3_64_hexdigest

from checkfreq.config import CFConfig
from checkfreq.errors import SnapshotError
from checkfreq.snapshot.arena import Arena, Slot
from checkfreq.snapshot.backends import UpdateStreams, backend_in_use, backend_of
from checkfreq.snapshot.device_engine import DeviceEngine
from checkfreq.snapshot.engine import (
    Copy,
    HostEngine,
    OnCopied,
    SnapshotEngine,
    attempted,
    fingerprint,
    make_copy,
    slot_fingerprint,
)
from checkfreq.snapshot.evidence import Evidence, Sample
from checkfreq.snapshot.frozen import FrozenState
from checkfreq.snapshot.layout import StateLayout
from checkfreq.snapshot.watch import UnannouncedWrite, chosen, require_unchanged, sampled
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
        self._watched: frozenset[int] = frozenset()
        self._unverified: _Expected | None = None
        self._frozen = FrozenState(full_copy_every=config.full_copy_every)
        #: Whether settled tensors may be copied later; to be told of every boundary.
        self.evidence = Evidence()
        #: Bytes of state on each accelerator, as of the last ``make_room``.
        self.device_bytes: dict[torch.device, int] = {}
        #: Layouts planned so far.
        self.num_layouts = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot; 0 before the first layout."""
        return 0 if self._layout is None else self._layout.total_bytes

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
        if not self._arena.fits(layout.total_bytes):
            if not all(slot.is_free for slot in self._arena.slots):
                return False
            self.allocate(layout.total_bytes)
        self._arena.fault_in()
        if layout is not self._layout or has_moved:
            self.device_bytes = _bytes_by_device(captured, layout)
            self._engine().look_at(self.device_bytes)
        if layout is not self._layout:
            self._layout = layout
            self._watched = _watched(captured, layout)
            self.num_layouts += 1
        return True

    def allocate(self, state_bytes: int) -> None:
        """Allocate slots; their pages are faulted in by a background thread."""
        self._arena.allocate(state_bytes)
        self._listener.forget_slots()
        for slot in self._arena.slots:
            self._listener.share_slot(slot.index, fd=slot.fd, num_bytes=slot.num_bytes)

    def take(self, captured: CapturedState, slot: Slot, *, on_copied: OnCopied) -> Snapshot:
        """Begin a snapshot into ``slot``, after ``make_room`` with the same state.

        It is complete when this returns, on a device in the order of the stream, where nothing
        says that updates wait for the copy. ``on_copied`` gets UnannouncedWrite if a settled
        tensor changed under the copy.
        """
        layout = self._layout
        assert layout is not None
        self._prepare(slot, layout)
        with gc_paused():
            copies = _copies(captured, layout, self._watched, may_settle=self.evidence.holds)
            held = self._held_in(slot, copies, layout)
        # Digested before the copy begins: this is what the tensors were at the boundary. Without
        # the option nothing may keep the source tensors alive after the copy.
        expected = _Expected.of(copies, captured) if self._config.verify_settled else None
        self._unverified = expected
        report = self._reporting(slot, expected, on_copied)
        if held:
            copies = tuple(copy for index, copy in enumerate(copies) if index not in held)
        self._engine().start(copies, slot, on_copied=report)
        return Snapshot(slot, copies, layout.total_bytes)

    def _held_in(self, slot: Slot, copies: Sequence[Copy], layout: StateLayout) -> frozenset[int]:
        """Indices of the frozen tensors that the slot has, as they are now."""
        can_tell = self.evidence.holds and not self._config.verify_settled
        return self._frozen.begin(copies, layout, slot, can_tell=can_tell)

    def _reporting(self, slot: Slot, expected: _Expected | None, on_copied: OnCopied) -> OnCopied:
        """``on_copied``, after what the complete slot tells; any thread."""
        layout, watched, attempts = self._layout, self._watched, self.evidence.attempts
        assert layout is not None

        def report(error: BaseException | None) -> None:
            if error is None and expected is not None:
                error = attempted(lambda: require_unchanged(expected.torn_in(slot)))
            if error is None:
                contents = {layout.names[i]: _sample(layout.destinations[i], slot) for i in watched}
                self.evidence.compare(Sample(attempts, contents))
            elif isinstance(error, UnannouncedWrite):
                self.evidence.refute()
            self._frozen.ended(slot, complete=error is None)
            on_copied(error)

        return report

    def fence(self) -> float:
        """Have the next weight update come after the copy; returns the host's wait in seconds."""
        if self._chosen is None:
            return 0.0
        return self._chosen.fence(timeout_s=self._config.barrier_timeout_s)

    def changed_settled(self) -> list[str]:
        """Settled tensors that changed since the boundary of the latest snapshot.

        To be asked before the next update. Empty without ``CFConfig.verify_settled``, and for all
        later updates. Waits for the copy.
        """
        expected, self._unverified = self._unverified, None
        if expected is None:
            return []
        if not self._engine().wait_copied(timeout_s=self._config.barrier_timeout_s):
            raise SnapshotError(
                "verify_settled: the snapshot was not finished after "
                f"{self._config.barrier_timeout_s:.0f} s (CFConfig.barrier_timeout_s)"
            )
        return expected.changed()

    def forget(self) -> None:
        """State was restored: the snapshot before says nothing about it."""
        self._unverified = None
        self._frozen.forget()
        self.evidence.forget()

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
        slot.frozen = None


@dataclass(frozen=True, slots=True)
class _Expected:
    """The settled tensors of a snapshot, with their digests at its boundary."""

    copies: tuple[tuple[Copy, str], ...]

    @classmethod
    def of(cls, copies: Iterable[Copy], captured: CapturedState) -> _Expected:
        """Digest the settled ones as they are now, also if they are copied at once."""
        for device in {ref.tensor.device for ref in captured.tensors if not ref.tensor.is_cpu}:
            torch.accelerator.synchronize(device)  # the update may be queued on any stream
        both = zip(copies, captured.tensors, strict=True)
        return cls(tuple((copy, fingerprint(copy)) for copy, ref in both if ref.settled))

    def changed(self) -> list[str]:
        """Names of the tensors that are not what they were."""
        return [copy.name for copy, digest in self.copies if fingerprint(copy) != digest]

    def torn_in(self, slot: Slot) -> list[str]:
        """Names of the tensors that the slot does not hold as they were."""
        return [copy.name for copy, digest in self.copies if slot_fingerprint(copy, slot) != digest]


def engine_for(
    chk: CFCheckpoint,
    *,
    place: SnapshotPlace | None = None,
    weighs_places: bool = True,
    streams: UpdateStreams | None = None,
) -> SnapshotEngine:
    """The engine for the tensors that ``chk`` tracks now, by where they are.

    ``streams``: where weights are updated. ``weighs_places``: without a ``place``, it may be
    changed later. Raises StateError for tensors on a device that no engine supports.
    """
    if backend_in_use() is None:
        return HostEngine()  # what is on no device at all, or has no bytes, capture refuses
    local = read_local_state(chk, positions={})
    device = backend_of([ref.tensor.device for ref in local.refs])
    if device is None:
        return HostEngine()
    return DeviceEngine(
        device,
        place=place or SnapshotPlace.HOST,
        weighs_places=place is SnapshotPlace.DEVICE or (place is None and weighs_places),
        streams=streams,
    )


def _bytes_by_device(captured: CapturedState, layout: StateLayout) -> dict[torch.device, int]:
    found: dict[torch.device, int] = {}
    for ref, (_, num_bytes) in zip(captured.tensors, layout.destinations, strict=True):
        if not ref.tensor.is_cpu:
            device = ref.tensor.device
            found[device] = found.get(device, 0) + num_bytes
    return found


def _watched(captured: CapturedState, layout: StateLayout) -> frozenset[int]:
    """Indices of the settled tensors in which writes are looked for."""
    frozen = frozenset(layout.frozen)
    settled = [
        index
        for index, ref in enumerate(captured.tensors)
        if ref.settled and index not in frozen  # no missed update would show in those
    ]
    return frozenset(settled[i] for i in chosen([layout.destinations[s][1] for s in settled]))


def _copies(
    captured: CapturedState, layout: StateLayout, watched: frozenset[int], *, may_settle: bool
) -> tuple[Copy, ...]:
    """The captured tensors with their places in the layout, which they fit.

    Without ``may_settle`` every tensor counts as volatile.
    """
    places = zip(layout.names, captured.tensors, layout.destinations, strict=True)
    read = watched if may_settle else frozenset()
    return tuple(
        [
            make_copy(
                Copy,
                (name, ref.tensor, offset, num_bytes, may_settle and ref.settled, index in read),
            )
            for index, (name, ref, (offset, num_bytes)) in enumerate(places)
        ]
    )


def _sample(destination: tuple[int, int], slot: Slot) -> bytes:
    """A few bytes of one tensor in a slot."""
    offset, num_bytes = destination
    return b"".join([slot.memory[offset + b : offset + e] for b, e in sampled(num_bytes)])
