"""From the state at a boundary to a durable checkpoint: both phases, and the waits between.

Owns what they share: arena, engine, snapshotter, persistence. A periodic checkpoint that would
have to wait is deferred and counted; one that must be taken waits, with a deadline. Belongs to
the training thread; only the hand-over at a copy's end runs on the thread that copied.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from checkfreq.config import CFConfig
from checkfreq.errors import CheckFreqError, PersistError, StateError
from checkfreq.pacing.environment import environment
from checkfreq.pacing.held_time import HeldTime
from checkfreq.pacing.profiler import Profiler
from checkfreq.pacing.timing import DeviceTimer, HostTimer, IterationTimer
from checkfreq.persist.attempts import Attempt, Marks
from checkfreq.persist.persistence import Persistence
from checkfreq.policy.retention import RetentionPolicy
from checkfreq.snapshot.arena import Arena, Slot
from checkfreq.snapshot.device import CudaDevice
from checkfreq.snapshot.device_copier import Limits
from checkfreq.snapshot.device_engine import DevicePinner
from checkfreq.snapshot.device_memory import room_for_snapshot
from checkfreq.snapshot.digests import (
    ValueDigests,
    broadcast_anywhere,
    digest_values,
    samples,
    structure_digest,
    structure_listing,
)
from checkfreq.snapshot.snapshotter import Snapshotter, engine_for
from checkfreq.state.capture import capture, read_local_state
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.collector import CapturedState, LocalState
from checkfreq.state.gradients import PendingGradients
from checkfreq.state.positions import Positions
from checkfreq.types import Role, SnapshotPlace

logger = logging.getLogger(__name__)

#: Slots are prepared in this process: no reply of the worker tells that they are.
_LOOK_FOR_SLOTS_S = 0.02


def first_device(captured: CapturedState) -> torch.device:
    """Of the devices that hold state, of which this rank may write nothing."""
    refs = captured.tensors if captured.local is None else captured.local.refs
    return min((ref.tensor.device for ref in refs if not ref.tensor.is_cpu), key=str)


class Pipeline:
    """Takes snapshots of ``chk`` and ``positions`` and sees them become checkpoints."""

    def __init__(
        self,
        chk_dir: Path,
        chk: CFCheckpoint,
        positions: Positions,
        *,
        config: CFConfig,
        retention: RetentionPolicy,
        tolerate_failures: int | None,
        profiler: Profiler,
        role: Role = Role(),
    ) -> None:
        self._role = role
        #: Which gradients no update has used.
        self.gradients = PendingGradients(chk.optimizers)
        self._chk_dir = chk_dir
        self._chk = chk
        self._positions = positions
        self._config = config
        self._profiler = profiler
        pinner = DevicePinner(CudaDevice())
        self._arena = Arena(config=config, pinner=pinner)
        self.persistence = Persistence(
            chk_dir,
            config=config,
            retention=retention,
            tolerate_failures=tolerate_failures,
            release=self._arena.release,
            role=role,
        )
        self.persistence.on_ended = self._ended
        if not role.shares_all:
            self.persistence.confirmed_step = -1
        self._snapshotter = Snapshotter(
            choose_engine=partial(engine_for, chk, pinner=pinner, place=config.snapshot_place),
            arena=self._arena,
            listener=self.persistence.client,
            config=config,
        )
        self._is_deferred = False
        self._close_by_s: float | None = None
        self.last_started_step = 0
        self.num_deferred = 0
        #: How long training has been held so far, and by what.
        self.held = HeldTime(device_wait_s=lambda: self._snapshotter.device_wait_s)
        self._device_refused = False
        self._num_layouts_told = 0
        self._values: ValueDigests | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot; 0 before the first boundary."""
        return self._snapshotter.state_bytes

    @property
    def is_deferred(self) -> bool:
        """True while a periodic checkpoint is still to be made up for."""
        return self._is_deferred

    @property
    def is_on_device(self) -> bool:
        """Whether updates wait on a device, and the host runs ahead of it."""
        return self._snapshotter.engine.fence_on_device

    @property
    def is_quiet(self) -> bool:
        """True while the worker has nothing to do."""
        return not self.persistence.book.num_active and not self.persistence.client.is_busy

    @property
    def has_room(self) -> bool:
        """Whether a snapshot could be taken now."""
        return self._arena.may_have_room()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait for a free slot at most so long; whether there is one."""
        return self.persistence.wait_until(
            self._arena.may_have_room, timeout_s=timeout_s, look_every_s=_LOOK_FOR_SLOTS_S
        )

    @property
    def is_ready(self) -> bool:
        """True once there are slots and they are faulted in."""
        return bool(self._arena.slots) and self._arena.is_ready()

    # ---- what the costs depend on

    @property
    def is_restructured(self) -> bool:
        """Whether the state was laid out anew since its structure was last asked for."""
        return self._snapshotter.num_layouts != self._num_layouts_told

    def structure_digest(self) -> str:
        """Equal on ranks whose state has the same structure."""
        self._num_layouts_told = self._snapshotter.num_layouts
        return structure_digest(self._capture())

    def structure_listing(self) -> dict[str, str]:
        """The structure of the state in words, by name."""
        return structure_listing(self._capture())

    def note_values(self) -> None:
        """Digest what is to be the same on all ranks, as of this boundary."""
        modules = [value for value in self._chk.tracked.values() if isinstance(value, nn.Module)]
        self._values = digest_values(self._local_state(), modules, CudaDevice())

    def values_digest(self) -> str | None:
        """See distributed.comparison.Compared, as those below."""
        return self._noted.digest()

    def values_listing(self) -> dict[str, str]:
        """Without buffers that an untracked wrapper broadcasts."""
        left_out = broadcast_anywhere(self._local_state())
        return {name: text for name, text in self._noted.found.items() if name not in left_out}

    def weights(self) -> Collection[str]:
        """Names of what only a weight update changes."""
        return self._noted.weights

    def samples(self, names: Collection[str]) -> dict[str, list[float]]:
        """Some numbers of each of these tensors, as they are now."""
        return samples(self._local_state(), names)

    @property
    def _noted(self) -> ValueDigests:
        assert self._values is not None
        return self._values

    def _local_state(self) -> LocalState:
        """The whole state as this rank has it; chooses no engine, so also before training."""
        return read_local_state(self._chk, positions={}, fence_on_device=False)

    @property
    def num_slots(self) -> int:
        """Snapshots that can exist at once; 0 before the first boundary."""
        return len(self._arena.slots)

    def environment(self) -> dict[str, object]:
        """Everything that the costs of this run depend on, JSON-able."""
        config = self._config
        return {
            **environment(self._chk_dir),
            "world": self._role.world,
            "group": len(self._role.group),
            "split": self._role.split,
            "settings": {
                "num_slots": config.num_slots,
                "snapshot_place": config.snapshot_place and config.snapshot_place.value,
                "writer_threads": config.writer_threads,
                "write_chunk_bytes": config.write_chunk_bytes,
                "max_write_bytes_per_s": config.max_write_bytes_per_s,
                "nice": config.nice,
                "verify_settled": config.verify_settled,
            },
            "state": self._snapshotter.layout_digest,
            "iterators": self._positions.layouts(),
        }

    def timer(self) -> IterationTimer:
        """A timer for where the state is (the first device, if on several)."""
        if not self.is_on_device:
            return HostTimer()
        return DeviceTimer(CudaDevice(), first_device(self._capture()))

    @property
    def place(self) -> SnapshotPlace:
        """Where snapshots are taken."""
        return self._snapshotter.engine.place

    def set_place(self, place: SnapshotPlace) -> None:
        """Take the next snapshots there, unless ``CFConfig.snapshot_place`` says where."""
        if self._config.snapshot_place is None:
            self._snapshotter.engine.place = place

    def _device_room(self, attempt: Attempt) -> int | None:
        """What a device snapshot of the whole state may use; at least ``state_bytes`` if it fits.

        None where the policy has no choice, and once a device refused although it seemed to have
        room.
        """
        if not self._profiler.decides or self._config.snapshot_place is not None:
            return None
        if not self.is_on_device or self._device_refused:
            return None
        was_on_device = attempt.device_copy_s is not None
        if self.place is SnapshotPlace.DEVICE and attempt.copied_s and not was_on_device:
            self._device_refused = True
            return None
        rooms = []
        for device, num_bytes in self._snapshotter.device_bytes.items():
            room = room_for_snapshot(device)
            if room is None:
                return None
            held = num_bytes if was_on_device else 0
            rooms.append(room + held - num_bytes - Limits().reserve_bytes)
        return max(0, self.state_bytes + min(rooms)) if rooms else None

    def _ended(self, attempt: Attempt) -> dict[str, object]:
        try:
            self._profiler.ended(attempt, free_device_bytes=self._device_room(attempt))
            return {**self._profiler.stats(), "place": self.place.value}
        except Exception:  # measuring must never end training, least of all in a commit
            logger.exception("cannot take in the costs of step %d", attempt.step)
            return {}

    # ---- memory

    def prepare(self) -> None:
        """After the first update the state has its full size: get the slots ready early."""
        if self._snapshotter.state_bytes == 0:
            self._snapshotter.make_room(self._capture())

    def require_memory(self, state_bytes: int) -> None:
        """ConfigError if no slot for so large a state fits the memory that may be used."""
        self._arena.num_affordable(state_bytes)

    def allocate(self, state_bytes: int) -> None:
        """Get slots ready for a state of which only the size is known: one just restored."""
        self._snapshotter.allocate(state_bytes)

    def continue_from(self, step: int, *, attempt: str) -> None:
        """``step`` was restored: it is durable, and the next is counted from it."""
        self.last_started_step = step
        self.persistence.book.last_durable_step = step
        self.persistence.book.durable.append((step, attempt))
        self.persistence.alarm.durable(step)

    def confirm(self, step: int) -> None:
        """All ranks know now that ``step`` is committed in every directory."""
        if not self._role.leads:
            if step != self.persistence.book.last_durable_step:
                self.persistence.alarm.durable(step)
            self.persistence.book.last_durable_step = step
        elif not self._role.shares_all:
            self.persistence.confirm(step)

    # ---- the gate

    def fence(self) -> None:
        """Order the next weight update after the copy in progress.

        With ``verify_settled``, raises StateError if settled state changed before it.
        """
        self._profiler.update()
        waited_s = self._snapshotter.fence()
        self.held.fence(waited_s)
        if waited_s:
            for attempt in self.persistence.book.active[-1:]:
                attempt.stall_s += waited_s
        changed = self._snapshotter.changed_settled() if self._config.verify_settled else []
        if changed:
            raise StateError(
                f"settled state changed outside a weight update: {', '.join(changed)}. Expected "
                "only optimizer steps to change it since the last boundary. Write to it inside "
                "`with cf_manager.updating():`, or declare it in CFCheckpoint(volatile=(...))"
            )

    # ---- checkpoints

    def checkpoint(
        self, step: int, reason: str, marks: Marks, *, must: bool, agreed: str | None = None
    ) -> Attempt | None:
        """Take a snapshot of the boundary ``step``; without ``must`` only if nothing waits.

        ``agreed`` is the id that the ranks gave to this attempt. None if it was deferred (never
        with ``must``), or if this step is durable already.
        """
        start_s = time.perf_counter()
        if agreed is None and self.is_written(step):
            return self.mark(step, marks)
        captured = self._capture() if must or self._arena.may_have_room() else None
        slot = None if captured is None else self._slot_for(captured, must=must)
        if captured is None or slot is None:
            ready = self._arena.is_ready()
            self.defer(step, why="no free slot" if ready else "slots are being prepared")
            return None
        attempt = Attempt(
            step, slot, reason, marks, time.perf_counter(), id=agreed or uuid.uuid4().hex
        )
        self.persistence.book.add(attempt)
        self.last_started_step = step
        self._is_deferred = False
        self._profiler.started(attempt)
        self._take(captured, attempt)
        held_s = time.perf_counter() - start_s
        attempt.stall_s += held_s
        self.held.snapshot(held_s)
        return attempt

    def _take(self, captured: CapturedState, attempt: Attempt) -> None:
        engine = self._snapshotter.engine

        def on_copied(error: BaseException | None) -> None:
            attempt.copy_s = engine.last_copy_s
            attempt.device_copy_s = engine.last_device_copy_s
            if attempt.copied(error):
                try:
                    self.persistence.hand_over(attempt, captured.objects, captured.rank_objects)
                except Exception as failure:  # on the copy thread: must not end it
                    attempt.spoil(failure)

        try:
            self._snapshotter.fence()  # a copy still active: this boundary saw no update
            self._snapshotter.take(captured, attempt.slot, on_copied=on_copied)
        except BaseException as error:  # Ctrl-C too: else the attempt would never end
            attempt.spoil(error)
            raise

    def mark(self, step: int, marks: Marks) -> Attempt | None:
        """Add marks to a step that is written, or on its way: then its attempt."""
        if marks and self._role.leads:
            self.persistence.add_marks(step, marks)
        return self.persistence.book.find(step)

    def is_written(self, step: int) -> bool:
        """Whether ``step``, or this rank's part of it, is durable or on its way."""
        book = self.persistence.book
        return step in (book.last_durable_step, book.last_written_step) or (
            book.find(step) is not None
        )

    def _capture(self) -> CapturedState:
        return capture(
            self._chk,
            positions=self._positions.read(),
            gradients=self.gradients.read(),
            fence_on_device=self._snapshotter.fence_on_device,
            role=self._role,
        )

    def _slot_for(self, captured: CapturedState, *, must: bool) -> Slot | None:
        """A slot that fits the state; None if there is none now and ``must`` is not set."""
        if not self._snapshotter.make_room(captured):
            if not must:
                return None
            self.wait_idle()
            self._snapshotter.make_room(captured)
        if must and not self._arena.may_have_room():
            with self.waiting():
                self._wait_until(
                    lambda: self._arena.wait_ready(timeout_s=0.0),
                    "the slots to be prepared",
                    look_every_s=_LOOK_FOR_SLOTS_S,
                )
                self._wait_until(self._arena.has_free_slot, "a free snapshot slot")
        return self._arena.acquire() if self._arena.wait_ready(timeout_s=0.0) else None

    def defer(self, step: int, *, why: str) -> None:
        """Count a periodic checkpoint that was due and has to wait; one event each."""
        if not self._is_deferred:
            self.num_deferred += 1
            self._is_deferred = True
            self.persistence.record("deferred", step, why=why)

    # ---- waiting

    def outcome(self, attempt: Attempt | None) -> CheckFreqError | None:
        """Wait for an attempt's end; returns its error."""
        if attempt is None:
            return None
        with self.waiting():
            self._wait_until(lambda: attempt.state.ended, f"step {attempt.step} to be durable")
        return attempt.error

    def has_ended(self, attempt: Attempt | None, timeout_s: float) -> bool:
        """Wait at most so long for an attempt's end; whether it has come."""
        return attempt is None or self.persistence.wait_until(
            lambda: attempt.state.ended, timeout_s=timeout_s
        )

    def wait_for_all(self) -> None:
        """``wait_idle``, because the user asked for it."""
        with self.waiting():
            self.wait_idle()

    def is_idle(self, timeout_s: float) -> bool:
        """Wait at most so long until no attempt is in flight; whether that is so."""
        book = self.persistence.book
        return self.persistence.wait_until(lambda: not book.active, timeout_s=timeout_s)

    def is_answered(self, timeout_s: float) -> bool:
        """Wait at most so long until the worker has done all it was asked; whether it has."""
        return self.persistence.wait_until(
            lambda: not self.persistence.client.is_busy, timeout_s=timeout_s
        )

    def wait_answered(self) -> None:
        """Wait until the worker has done all it was asked to."""
        self._wait_until(
            lambda: not self.persistence.client.is_busy, "the worker to note what it was asked"
        )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What has to be waited for, or what the user chose to, is no periodic one's cost."""
        self._profiler.disturb()
        with self.held.waiting():
            yield

    def wait_idle(self) -> None:
        """Wait until no attempt is in flight."""
        self._wait_until(lambda: not self.persistence.book.active, "checkpoints in flight")

    def _wait_until(
        self, condition: Callable[[], bool], what: str, *, look_every_s: float = 1.0
    ) -> None:
        limit_s = self.patience_s()
        if not self.persistence.wait_until(condition, timeout_s=limit_s, look_every_s=look_every_s):
            raise PersistError(
                f"waited {limit_s:.0f} s for {what} in vain (CFConfig.close_timeout_s, or the "
                "timeout_s given to close)",
                step=self.last_started_step,
                phase="wait",
            )

    def patience_s(self) -> float:
        """The longest any wait may be: while closing, what is left of the time for all of it."""
        if self._close_by_s is None:
            return self._config.close_timeout_s
        return max(0.0, self._close_by_s - time.monotonic())

    def begin_close(self, *, timeout_s: float) -> None:
        """From now on all waits together, and ``close``, may take ``timeout_s``."""
        self._close_by_s = time.monotonic() + timeout_s

    def finish_in_flight(self) -> None:
        """Wait for what is in flight; at the deadline it is left."""
        self.persistence.wait_until(
            lambda: not self.persistence.book.active, timeout_s=self.patience_s()
        )

    def close(self) -> None:
        """End the helper threads and the worker, and free the slots."""
        self.gradients.close()
        self._snapshotter.close()
        self.persistence.close(timeout_s=self.patience_s())
        self._arena.close()
