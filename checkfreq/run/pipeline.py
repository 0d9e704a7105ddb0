"""From the state at a boundary to a durable checkpoint: both phases, and the waits between.

Owns what the phases share: arena, engine, snapshotter, persistence. A periodic checkpoint that
would have to wait is deferred and counted; one that must be taken waits, with a deadline. Belongs
to the training thread; only the hand-over at the end of a copy runs on the thread that copied.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from checkfreq.config import CFConfig
from checkfreq.errors import CheckFreqError, PersistError, StateError
from checkfreq.pacing.environment import environment
from checkfreq.pacing.held_time import HeldTime
from checkfreq.pacing.profiler import Profiler
from checkfreq.pacing.timing import DeviceTimer, HostTimer, IterationTimer
from checkfreq.persist.attempts import Attempt, Marks
from checkfreq.persist.persistence import Persistence
from checkfreq.policy.ending import Needs
from checkfreq.policy.retention import RetentionPolicy
from checkfreq.run.inheritance import Inheritance
from checkfreq.run.notices import LastMoment
from checkfreq.run.replicas import Replicas
from checkfreq.snapshot.arena import Arena, Slot
from checkfreq.snapshot.backends import UpdateStreams, backend_for_slots, backend_of, is_capturing
from checkfreq.snapshot.pinning import DevicePinner
from checkfreq.snapshot.snapshotter import Snapshotter, engine_for
from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.collector import CapturedState
from checkfreq.state.gradients import PendingGradients
from checkfreq.state.positions import Positions
from checkfreq.types import Role, SnapshotPlace

logger = logging.getLogger(__name__)

#: Slots are prepared in this process: no reply of the worker announces them, so look this often.
_LOOK_FOR_SLOTS_S = 0.02
#: How often a wait looks whether SIGTERM came, which may leave it less time.
_LOOK_AT_PATIENCE_S = 1.0
#: Of the time after a stop: to log what is not durable, and to exit.
_LAST_WORDS_S = 1.0


def first_device(captured: CapturedState) -> torch.device:
    """The first device that holds state, even if this rank writes none of it."""
    refs = captured.tensors if captured.local is None else captured.local.refs
    return min((ref.tensor.device for ref in refs if not ref.tensor.is_cpu), key=str)


class Pipeline:
    """Takes snapshots of ``chk`` and ``positions``, and turns them into durable checkpoints."""

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
        last_moment: LastMoment,
        current_step: Callable[[], int],
        role: Role = Role(),
    ) -> None:
        self._role = role
        #: Which gradients a later update will use.
        self.gradients = PendingGradients(chk.optimizers, is_capturing=is_capturing)
        self._chk_dir = chk_dir
        self._chk = chk
        self._positions = positions
        self._config = config
        self._profiler = profiler
        self._last_moment = last_moment
        self._arena = Arena(config=config, pinner=DevicePinner(backend_for_slots()))
        self.persistence = Persistence(
            chk_dir,
            config=config,
            retention=retention,
            tolerate_failures=tolerate_failures,
            release=self._arena.release,
            on_ended=self._ended,
            current_step=current_step,
            on_upload=profiler.uploading,
            role=role,
            on_notice=last_moment.board.note,
        )
        self._streams = UpdateStreams()
        self._snapshotter = Snapshotter(
            choose_engine=partial(
                engine_for,
                chk,
                place=config.snapshot_place,
                weighs_places=profiler.decides,
                streams=self._streams,
            ),
            arena=self._arena,
            listener=self.persistence,
            config=config,
        )
        #: What is known about updates; to be told of every boundary.
        self.evidence = self._snapshotter.evidence
        #: What a killed run left in memory, to be read from until this one has restored.
        self.inheritance = Inheritance(chk_dir, role=role)
        self._is_deferred = False
        self._close_by_s: float | None = None
        self.last_started_step = 0
        #: The last boundary of the newest epoch that ended in this process.
        self.last_epoch_end: int | None = None
        self.num_deferred = 0
        #: How long training has been held so far, and by what.
        self.held = HeldTime(device_wait_s=lambda: self._snapshotter.device_wait_s)
        self._copies_from_device = False  # is_on_device, as of the latest snapshot
        #: What ranks compare of their state.
        self.replicas = Replicas(
            chk, capture=self._capture, num_layouts=lambda: self._snapshotter.num_layouts
        )

    def start(self, *, inherits: bool) -> None:
        """Take over the worker of a killed run, if there is one, or start one; waits for neither.

        Every rank has asked what there is (``Inheritance.ask``). Without ``inherits`` the memory of
        earlier runs is given up.
        """
        if not inherits:
            self.inheritance.decline()
        elif self.inheritance.take(self._arena, self.persistence):
            return
        self.persistence.start()

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot; 0 before the first boundary."""
        return self._snapshotter.state_bytes

    @property
    def is_deferred(self) -> bool:
        """True while a deferred periodic checkpoint is still to be taken."""
        return self._is_deferred

    @property
    def is_on_device(self) -> bool:
        """Whether updates wait on a device, and the host runs ahead of it."""
        return self._snapshotter.engine.fence_on_device

    @property
    def is_quiet(self) -> bool:
        """True while the worker has nothing to do."""
        persistence = self.persistence
        return not persistence.num_in_flight and not persistence.has_unanswered_requests

    @property
    def has_room(self) -> bool:
        """Whether a snapshot could be taken now."""
        return self._arena.may_have_room()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for a free slot; returns whether there is one.

        For checkpoints that must be taken.
        """
        self._arena.hurry()
        return self.persistence.wait_until(
            self._arena.may_have_room, timeout_s=timeout_s, look_every_s=_LOOK_FOR_SLOTS_S
        )

    @property
    def is_ready(self) -> bool:
        """True once slots exist and are faulted in."""
        return bool(self._arena.slots) and self._arena.is_ready()

    # ---- what the costs depend on

    @property
    def num_slots(self) -> int:
        """Snapshots that can exist at once; 0 before the first boundary."""
        return len(self._arena.slots)

    def environment(self) -> dict[str, object]:
        """What the costs of this run depend on, as JSON."""
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
                "full_copy_every": config.full_copy_every,
                "nice": config.nice,
                "verify_settled": config.verify_settled,
            },
            "state": self._snapshotter.layout_digest,
            "iterators": self._positions.layouts(),
        }

    def timer(self) -> IterationTimer:
        """A timer for the device that holds the state (the first one, if on several)."""
        if not self.is_on_device:
            return HostTimer()
        index = first_device(self._capture())
        device = backend_of([index])
        assert device is not None
        return DeviceTimer(device, index)

    @property
    def place(self) -> SnapshotPlace:
        """Where snapshots are taken."""
        return self._snapshotter.engine.place

    def set_place(self, place: SnapshotPlace) -> None:
        """Take the next snapshots there, unless ``CFConfig.snapshot_place`` says where."""
        if self._config.snapshot_place is None:
            self._snapshotter.engine.place = place

    def _device_room(self) -> int | None:
        """Bytes that a snapshot in device memory may use; at least ``state_bytes`` if it fits.

        None where the policy has no choice, and before it is known.
        """
        if not self._profiler.decides or self._config.snapshot_place is not None:
            return None
        snapshotter, rooms = self._snapshotter, []
        for device, num_bytes in snapshotter.device_bytes.items():
            spare = snapshotter.engine.spare_bytes(device)
            if spare is None:
                return None
            rooms.append(spare - num_bytes)
        return max(0, self.state_bytes + min(rooms)) if rooms else None

    def _ended(self, attempt: Attempt) -> dict[str, object]:
        if attempt.is_inherited:  # nothing that it cost was measured in this process
            return {}
        self._last_moment.ended(attempt)
        try:
            self._profiler.ended(attempt, free_device_bytes=self._device_room())
            return {**self._profiler.measured(), "place": self.place.value}
        except Exception:  # a fault in measuring must not end training
            logger.exception("cannot take in the costs of step %d", attempt.step)
            return {}

    def needs(self) -> Needs:
        """What this rank's last checkpoint will need before the run ends."""
        is_measured = self._last_moment.is_measured
        return self._last_moment.needs(
            state_bytes=self.state_bytes,
            started_s=self.persistence.started_s(),
            upload_s=self.persistence.upload_s(),
            cached_s=None if is_measured else self._profiler.costs().get("durable_s"),
        )

    # ---- memory

    def prepare(self) -> None:
        """Prepare slots at the first boundary, when the state has its full size."""
        if self._snapshotter.state_bytes == 0:
            self._snapshotter.make_room(self._capture())
        self._copies_from_device = self.is_on_device

    def pin_slots(self) -> None:
        """Have slots pinned that should be and are not; before the ranks agree on a checkpoint.

        Checkpoints that need not be taken now are deferred until it is done: a copy to a slot that
        is not pinned would hold this thread.
        """
        if self._copies_from_device:
            self._arena.pin()

    def require_memory(self, state_bytes: int) -> None:
        """Raise ConfigError if not even one slot for such a state fits the memory limit."""
        if not self._arena.fits(state_bytes):
            self._arena.num_affordable(state_bytes)

    def allocate(self, state_bytes: int) -> None:
        """Prepare slots for a restored state, of which only the size is known yet.

        Nothing to do if slots that were taken over fit it. Where they do not, and some are in use,
        the first boundary makes others.
        """
        is_free = all(slot.is_free for slot in self._arena.slots)
        if self._arena.fits(state_bytes):
            self._arena.fault_in()
            self._arena.pin()
        elif is_free:
            self._snapshotter.allocate(state_bytes)

    def continue_from(
        self, step: int, *, attempt: str, was_chosen: bool, is_durable: bool = True
    ) -> None:
        """``step`` was restored: intervals count from it; see also ``Persistence``."""
        self._snapshotter.forget()
        self.last_started_step = step
        self.persistence.continue_from(
            step, attempt=attempt, was_chosen=was_chosen, is_durable=is_durable
        )

    # ---- the fence

    def fence(self) -> None:
        """Order the next weight update after the copy in progress.

        With ``verify_settled``, raises StateError if settled state changed before it.
        """
        self._profiler.update()
        self._streams.note()
        waited_s = self._snapshotter.fence()
        self.held.fence(waited_s)
        if waited_s:
            self.persistence.note_stall(waited_s)
        self.verify()

    def verify(self) -> None:
        """With ``verify_settled``, raise StateError if settled state changed since a snapshot."""
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
        """Take a snapshot of the boundary ``step``; without ``must``, only if it need not wait.

        ``agreed`` is the id that the ranks gave to this attempt. None if it was deferred (never
        with ``must``), or if this step is durable already.
        """
        start_s = time.perf_counter()
        if agreed is None and self.is_written(step):
            return self.mark(step, marks)
        self.verify()  # no update came since the snapshot before if it was not verified yet
        captured = self._capture() if must or self._arena.may_have_room() else None
        slot = None if captured is None else self._slot_for(captured, must=must)
        if captured is None or slot is None:
            ready = self._arena.is_ready()
            self.defer(step, why="no free slot" if ready else "slots are being prepared")
            return None
        attempt = Attempt(
            step,
            slot,
            reason,
            marks,
            time.perf_counter(),
            at_epoch_end=step == self.last_epoch_end,
            id=agreed or uuid.uuid4().hex,
        )
        self.persistence.begin(attempt)
        self.last_started_step = step
        self._is_deferred = False
        self._profiler.started(attempt)
        self._take(captured, attempt)
        self._copies_from_device = self.is_on_device  # state may have moved there
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
                attempt.slot.complete_s = attempt.copied_s
                try:
                    self.persistence.hand_over(attempt, captured.objects, captured.rank_objects)
                except Exception as failure:  # on the copy thread, which must survive it
                    attempt.spoil(failure)

        try:
            # A copy is still active if no update came since the last boundary.
            self._snapshotter.fence()
            self._snapshotter.take(captured, attempt.slot, on_copied=on_copied)
        except BaseException as error:  # also Ctrl-C: otherwise the attempt would never end
            attempt.spoil(error)
            raise

    def mark(self, step: int, marks: Marks) -> Attempt | None:
        """Add marks to a step that is written or in flight; returns its attempt if in flight."""
        if marks and self._role.leads:
            self.persistence.add_marks(step, marks)
        return self.persistence.in_flight(step)

    def is_written(self, step: int) -> bool:
        """Whether ``step``, or this rank's part of it, is durable or in flight."""
        return self.persistence.is_written(step)

    def _capture(self) -> CapturedState:
        return capture(
            self._chk,
            positions=self._positions.read(),
            gradients=self.gradients.read(),
            role=self._role,
        )

    def _slot_for(self, captured: CapturedState, *, must: bool) -> Slot | None:
        """A slot that fits the state; None if none is free and ``must`` is not set."""
        if not self._snapshotter.make_room(captured):
            if not must:
                return None
            self.wait_idle()
            self._snapshotter.make_room(captured)
        if must and not self._arena.may_have_room():
            self._arena.hurry()
            with self.waiting():
                self._wait_until(
                    lambda: self._arena.wait_ready(timeout_s=0.0),
                    "the slots to be prepared",
                    look_every_s=_LOOK_FOR_SLOTS_S,
                )
                self._wait_until(self._arena.has_free_slot, "a free snapshot slot")
        return self._arena.acquire() if self._arena.wait_ready(timeout_s=0.0) else None

    def defer(self, step: int, *, why: str) -> None:
        """Count a periodic checkpoint that is due and has to wait, with one event for each."""
        if not self._is_deferred:
            self.num_deferred += 1
            self._is_deferred = True
            self.persistence.record("deferred", step, why=why)

    # ---- waiting

    def outcome(self, attempt: Attempt | None) -> CheckFreqError | None:
        """Wait until an attempt has ended; returns its error, None if it is durable."""
        if attempt is None:
            return None
        with self.waiting():
            self._wait_until(lambda: attempt.state.ended, f"step {attempt.step} to be durable")
        return attempt.error

    def has_ended(self, attempt: Attempt | None, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for an attempt; returns whether it has ended."""
        return attempt is None or self.persistence.wait_until(
            lambda: attempt.state.ended, timeout_s=timeout_s
        )

    def wait_inherited(self, *, newer_than: int) -> None:
        """Wait until no later snapshot of the run before is in flight."""
        self._wait_until(
            lambda: not self.persistence.has_inherited(newer_than=newer_than),
            "checkpoints of the run before",
        )

    def wait_for_all(self) -> None:
        """``wait_idle`` at the user's request: not charged to periodic checkpoints."""
        with self.waiting():
            self.wait_idle()

    def is_idle(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s``; returns whether no attempt is in flight."""
        return self.persistence.wait_until(self._has_nothing_in_flight, timeout_s=timeout_s)

    def is_answered(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s``; returns whether the worker has answered every request."""
        return self.persistence.wait_until(
            lambda: not self.persistence.has_unanswered_requests, timeout_s=timeout_s
        )

    def wait_answered(self) -> None:
        """Wait until the worker has answered every request."""
        self._wait_until(
            lambda: not self.persistence.has_unanswered_requests,
            "the worker to note what it was asked",
        )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait that the user asked for, or that must happen: no periodic checkpoint's cost."""
        self._profiler.disturb()
        with self.held.waiting():
            yield

    def wait_idle(self) -> None:
        """Wait until no attempt is in flight."""
        self._wait_until(self._has_nothing_in_flight, "checkpoints in flight")

    def _has_nothing_in_flight(self) -> bool:
        return self.persistence.num_in_flight == 0

    def _wait_until(
        self, condition: Callable[[], bool], what: str, *, look_every_s: float = 1.0
    ) -> None:
        began_s = time.monotonic()
        if not self._comes(condition, look_every_s=look_every_s):
            raise PersistError(
                f"waited {time.monotonic() - began_s:.0f} s for {what} in vain "
                "(CFConfig.close_timeout_s or stop_grace_s, or the timeout_s given to close)",
                step=self.last_started_step,
                phase="wait",
            )

    def _comes(self, condition: Callable[[], bool], *, look_every_s: float = 1.0) -> bool:
        """Wait until ``condition()`` holds; False once patience is over."""
        began_s, left_s = time.monotonic(), self.patience_s()
        while not self.persistence.wait_until(
            condition, timeout_s=min(left_s, _LOOK_AT_PATIENCE_S), look_every_s=look_every_s
        ):
            if not left_s:
                return False
            left_s = self.patience_s(time.monotonic() - began_s)
        return True

    def patience_s(self, waited_s: float = 0.0) -> float:
        """How much longer a wait that has taken ``waited_s`` may go on: it may change meanwhile.

        While closing, the time left for all of them; once told to stop, what is left of that but
        for the time to say what is missing.
        """
        limit_s = self._config.close_timeout_s - waited_s
        if self._close_by_s is not None:
            limit_s = self._close_by_s - time.monotonic()
        if (left_s := self._last_moment.left_s()) is not None:
            limit_s = min(limit_s, left_s - _LAST_WORDS_S)
        return max(0.0, limit_s)

    def begin_close(self, *, timeout_s: float) -> None:
        """From now on, all waits and ``close`` together may take ``timeout_s``."""
        self._close_by_s = time.monotonic() + timeout_s

    def finish_in_flight(self) -> None:
        """Wait for attempts in flight; those not done at the deadline are abandoned."""
        self._comes(self._has_nothing_in_flight)

    def close(self) -> None:
        """End the helper threads and the worker, and free the slots."""
        self.gradients.close()
        self._snapshotter.close()
        self.persistence.close(
            timeout_s=self.patience_s(),
            left_s=self.patience_s,
            upload_left_s=self._last_moment.upload_left_s(),
        )
        self._arena.close()
