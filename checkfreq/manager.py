"""The object a training loop holds: decides at each boundary, takes snapshots, restores.

``step`` reads top down: reap what ended, count the boundary, decide, snapshot. Everything
here belongs to the training thread; the copy thread only hands a finished snapshot over.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from checkfreq.checkpoint import CFCheckpoint
from checkfreq.config import CFConfig
from checkfreq.errors import CheckFreqError, ConfigError, PersistError, StateError
from checkfreq.events import Event
from checkfreq.interrupt import StopNotice
from checkfreq.persist.attempts import Attempt, Marks
from checkfreq.persist.persistence import Persistence
from checkfreq.policy.cadence import ManualCadence
from checkfreq.policy.retention import KeepLast, RetentionPolicy
from checkfreq.restore import Found, Restorer, plan_restore
from checkfreq.snapshot.arena import Arena, Slot
from checkfreq.snapshot.choice import engine_for
from checkfreq.snapshot.device import CudaDevice
from checkfreq.snapshot.device_engine import DevicePinner
from checkfreq.snapshot.gate import UpdateGate
from checkfreq.snapshot.snapshotter import Snapshotter
from checkfreq.snapshot.state import CapturedState, capture
from checkfreq.types import CFMode

logger = logging.getLogger(__name__)

Closure = Callable[[], Any]


class PositionSource(Protocol):
    """What registers with a manager to have its position checkpointed: an iterator."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...
    def finish(self) -> None: ...


class CFManager:
    """Checkpoints one training run into one directory.

    ``chk_dir`` is made if needed and belongs to this run alone. ``chk`` names the state.
    ``mode`` MANUAL checkpoints every ``chk_freq`` boundaries (0: at epoch boundaries and on
    ``save`` only). ``max_overhead`` and ``mtbf_s`` (seconds) guide AUTO. ``retention`` chooses
    what to delete. More than ``tolerate_failures`` failed persists in a row raise.
    ``fresh=True`` starts over in a directory that holds checkpoints: they are set aside.

    Raises ConfigError for arguments that contradict each other or a directory that cannot be
    written. Use as a context manager, or call ``close``. Not thread safe.
    """

    def __init__(
        self,
        chk_dir: str | os.PathLike[str],
        chk: CFCheckpoint,
        *,
        mode: CFMode = CFMode.AUTO,
        chk_freq: int | None = None,
        max_overhead: float = 0.035,
        dynamic: bool = True,
        mtbf_s: float | None = None,
        retention: RetentionPolicy = KeepLast(3),
        tolerate_failures: int = 3,
        fresh: bool = False,
        config: CFConfig = CFConfig(),
    ) -> None:
        self._mode = mode
        self._cadence = _cadence(mode, chk_freq)
        _check_arguments(chk, max_overhead, mtbf_s, tolerate_failures)
        self._chk_dir = _usable(Path(chk_dir))
        self._chk = chk
        self._config = config
        self._dynamic = dynamic
        self._fresh = fresh
        self._global_step = 0
        self._last_started_step = 0
        self._restored_step: int | None = None
        self._num_deferred = 0
        self._is_deferred = False
        self._stall_s = 0.0
        self._requested: Marks | None = None
        self._sources: dict[str, PositionSource] = {}
        self._waiting_positions: dict[str, dict[str, Any]] = {}
        self._apply_rng: Callable[[], None] | None = None
        self._opened = False
        self._may_start = fresh
        self._iterated = False
        self._stopped = False
        self._closed = False
        pinner = DevicePinner(CudaDevice())
        self._arena = Arena(config=config, pinner=pinner)
        self._persistence = Persistence(
            self._chk_dir,
            config=config,
            retention=retention,
            tolerate_failures=tolerate_failures,
            release=self._arena.release,
        )
        if fresh:
            self._persistence.supersede_after = -1
        self._snapshotter = Snapshotter(
            choose_engine=partial(engine_for, chk, pinner=pinner),
            arena=self._arena,
            listener=self._persistence.persister,
            config=config,
        )
        self._persistence.start()
        self._gate = UpdateGate(chk.optimizers, barrier=self._barrier)
        self._notice = StopNotice(config.stop_signals)
        self._notice.install()

    # ---- weight updates

    def weight_update(
        self,
        optimizer: torch.optim.Optimizer | str | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        closure: Closure | None = None,
    ) -> Any:
        """Step the tracked optimizer, after the copy in progress; returns the closure's loss.

        With several tracked optimizers, name the one to step. With ``scaler``:
        ``scaler.step`` on it (on each, if several and none is named), then ``scaler.update``;
        a step that the scaler skips counts as an attempt.

        Raises ConfigError for an optimizer or scaler that is not tracked, or for a scaler
        with a closure.
        """
        targets = self._targets(optimizer, scaler)
        if scaler is None:
            return targets[0].step(closure) if closure is not None else targets[0].step()
        if closure is not None:
            raise ConfigError("weight_update: a GradScaler cannot step with a closure; pass one")
        if not any(tracked is scaler for tracked in self._chk.tracked.values()):
            raise ConfigError(
                "weight_update: the scaler is not tracked, so its scale would be lost on a "
                "restore; pass it to CFCheckpoint(scaler=...)"
            )
        for target in targets:
            scaler.step(target)
        self._gate.count()
        scaler.update()
        return None

    def _targets(
        self,
        optimizer: torch.optim.Optimizer | str | None,
        scaler: torch.amp.GradScaler | None,
    ) -> list[torch.optim.Optimizer]:
        tracked = self._chk.optimizers
        names = ", ".join(tracked) or "none"
        if optimizer is None:
            if len(tracked) == 1 or (tracked and scaler is not None):
                return list(tracked.values())
            raise ConfigError(
                f"weight_update: expected one tracked optimizer or the name of one, found: {names}"
            )
        for name, candidate in tracked.items():
            if optimizer is candidate or optimizer == name:
                return [candidate]
        raise ConfigError(f"weight_update: that optimizer is not tracked; tracked: {names}")

    def updating(self) -> AbstractContextManager[None]:
        """Bracket every parameter write that goes through no tracked ``optimizer.step()``.

        CUDA graph replays, weight clipping, EMA swaps, optimizers inside backward.
        """
        return self._gate.updating()

    @property
    def update_attempts(self) -> int:
        """Weight updates attempted in this process, skipped ones included."""
        return self._gate.attempts

    def _barrier(self) -> None:
        stall_s = self._snapshotter.barrier()
        self._stall_s += stall_s
        if stall_s:
            for attempt in self._persistence.book.active[-1:]:
                attempt.hold_s += stall_s
        changed = self._snapshotter.changed_settled() if self._config.verify_settled else []
        if changed:
            raise StateError(
                f"settled state changed outside a weight update: {', '.join(changed)}. Expected "
                "only optimizer steps to change it since the last boundary. Write to it inside "
                "`with cf_manager.updating():`, or declare it in CFCheckpoint(volatile=(...))"
            )

    # ---- boundaries

    def step(self) -> None:
        """Pass an iteration boundary: after a weight update and before the next batch.

        CFIterator calls it; a loop without one calls it once per update. Raises what went
        wrong in the background, and ConfigError at the first call in a directory that holds
        checkpoints when ``restore`` was not called.
        """
        self._pass_boundary(epoch_boundary=False)

    def end_epoch(self) -> None:
        """Pass the last boundary of an epoch."""
        self._pass_boundary(epoch_boundary=True)

    def _pass_boundary(self, *, epoch_boundary: bool) -> None:
        self._begin()
        self._persistence.reap()
        self._persistence.book.raise_if_intolerable()
        self._gate.pass_boundary()
        self._global_step += 1
        self._prepare_memory()
        self._take_due(epoch_boundary=epoch_boundary)
        if self._notice.is_set and not self._stopped:
            self._stop()

    def _take_due(self, *, epoch_boundary: bool) -> None:
        if self._requested is not None:
            marks, self._requested = self._requested, None
            self._checkpoint("requested", marks, must=True)
            return
        due = self._cadence.is_due(
            step=self._global_step,
            last_step=self._last_started_step,
            epoch_boundary=epoch_boundary,
        )
        if due or (self._is_deferred and self._cadence.interval_steps == 0):
            reason = "epoch" if epoch_boundary else "periodic"
            self._checkpoint(reason, Marks(), must=False)

    def _stop(self) -> None:
        logger.warning("%s received: taking the final checkpoint", self._notice.received)
        self._persistence.record("stop", self._global_step, signal=self._notice.received)
        self._make_durable("stop")
        self._stopped = True

    @property
    def should_stop(self) -> bool:
        """True once a stop signal came; leave the loop at the next boundary."""
        return self._notice.is_set

    @property
    def stopped(self) -> bool:
        """True once a stop signal came and the final checkpoint is durable."""
        return self._stopped

    @property
    def global_step(self) -> int:
        """Boundaries passed since training began, those before a restore included."""
        return self._global_step

    # ---- checkpoints

    def save(
        self, *, wait: bool = False, keep: bool = False, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Checkpoint at this boundary; between boundaries, at the next one.

        ``keep`` pins the checkpoint against retention; ``metrics`` are stored with it.
        ``wait=True`` returns once it is durable, and raises StateError between boundaries or
        the PersistError of the attempt. A step is written once: a second request for the same
        step only adds its marks.
        """
        marks = Marks(keep=keep, metrics=dict(metrics or {}))
        self._begin(iterating=False)
        if not self._gate.at_boundary:
            if wait:
                raise StateError(
                    "save(wait=True) between boundaries: an update was attempted since the last "
                    "one, so the state is not a boundary's. Call step() first, or save() without "
                    "wait to have it done at the next boundary"
                )
            self._request(marks)
            return
        attempt = self._checkpoint("requested", marks, must=True)
        if wait and (error := self._await(attempt)) is not None:
            raise error

    def _request(self, marks: Marks) -> None:
        if self._requested is None:
            self._requested = Marks()
        self._requested.merge(marks)

    def _checkpoint(self, reason: str, marks: Marks, *, must: bool) -> Attempt | None:
        """Take a snapshot of this boundary; without ``must`` it is deferred if it had to wait.

        None if it was deferred, or if this step is durable already.
        """
        start_s = time.perf_counter()
        if self._is_written():
            self._persistence.add_marks(self._global_step, marks)
            return self._persistence.book.find(self._global_step)
        captured = self._capture() if must or self._arena.may_have_room() else None
        slot = None if captured is None else self._slot_for(captured, must=must)
        if captured is None or slot is None:
            self._defer()
            return None
        attempt = Attempt(self._global_step, slot, reason, marks, start_s)
        self._persistence.book.add(attempt)
        self._last_started_step = self._global_step
        self._is_deferred = False
        self._take(captured, attempt)
        attempt.hold_s += time.perf_counter() - start_s
        self._stall_s += attempt.hold_s
        return attempt

    def _take(self, captured: CapturedState, attempt: Attempt) -> None:
        def on_copied(error: BaseException | None) -> None:
            if attempt.copied(error):
                self._persistence.hand_over(attempt, captured.objects)

        self._snapshotter.barrier()  # a copy still active: this boundary saw no update
        self._snapshotter.take(captured, attempt.slot, on_copied=on_copied)

    def _is_written(self) -> bool:
        book = self._persistence.book
        return (
            book.last_durable_step == self._global_step or book.find(self._global_step) is not None
        )

    def _capture(self) -> CapturedState:
        positions = {name: source.state_dict() for name, source in self._sources.items()}
        return capture(
            self._chk,
            positions={**self._waiting_positions, **positions},
            barrier_on_device=self._snapshotter.barrier_on_device,
        )

    def _slot_for(self, captured: CapturedState, *, must: bool) -> Slot | None:
        """A slot that fits the state; None if there is none now and ``must`` is not set."""
        if not self._snapshotter.make_room(captured):
            if not must:
                return None
            self._wait_until(lambda: not self._persistence.book.active, "the snapshot slots")
            self._snapshotter.make_room(captured)
        if not self._arena.wait_ready(timeout_s=self._config.close_timeout_s if must else 0.0):
            return None
        if must:
            self._wait_until(self._arena.has_free_slot, "a free snapshot slot")
        return self._arena.acquire()

    def _prepare_memory(self) -> None:
        """After the first update the state has its full size: get the slots ready early."""
        if self._snapshotter.state_bytes == 0:
            self._snapshotter.make_room(self._capture())

    def _defer(self) -> None:
        self._num_deferred += 1
        if not self._is_deferred:
            self._is_deferred = True
            why = "no free slot" if self._arena.is_ready() else "slots are being prepared"
            self._persistence.record("deferred", self._global_step, why=why)

    def _make_durable(self, reason: str) -> None:
        """Have this boundary's checkpoint on disk; tries twice, then raises why not."""
        if self._await(self._checkpoint(reason, Marks(), must=True)) is not None:
            error = self._await(self._checkpoint(reason, Marks(), must=True))
            if error is not None:
                raise error

    def _await(self, attempt: Attempt | None) -> CheckFreqError | None:
        """Wait for an attempt's end; returns its error."""
        if attempt is None:
            return None
        self._wait_until(lambda: attempt.state.ended, f"step {attempt.step} to be durable")
        return attempt.error

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        limit_s = self._config.close_timeout_s
        if not self._persistence.wait_until(condition, timeout_s=limit_s):
            raise PersistError(
                f"waited {limit_s:.0f} s for {what} in vain (CFConfig.close_timeout_s)",
                step=self._global_step,
                phase="wait",
            )

    def wait(self) -> None:
        """Return once every snapshot taken so far is durable or has failed.

        Raises the latest failure if there were more in a row than tolerated.
        """
        self._begin(iterating=False)
        self._wait_until(lambda: not self._persistence.book.active, "checkpoints in flight")
        self._persistence.book.raise_if_intolerable()

    def latest_step(self) -> int | None:
        """The newest committed step in the directory; None if there is none."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """All committed steps in the directory, ascending."""
        return self._persistence.store.steps()

    # ---- restore

    def restore(
        self,
        step: int | None = None,
        *,
        only: Collection[str] | None = None,
        exclude: Collection[str] = (),
        strict: bool = True,
    ) -> bool:
        """Bring the newest valid checkpoint, or ``step``, back into the live objects.

        Returns False if the directory never held a checkpoint (a first run), or with
        ``fresh=True``. ``only`` and ``exclude`` select tracked names; ``strict=False`` loads
        what fits. Newer checkpoints that do not validate are reported and quarantined. After
        restoring an older ``step``, the first commit sets the later ones aside.

        Raises StateError once iteration began, NoCheckpointError for a step that is not there,
        CorruptCheckpointError if nothing validates, MismatchError (nothing was changed) if the
        structure differs.
        """
        self._require_open()
        if self._iterated or self._gate.attempts:
            raise StateError(
                "restore() after iteration began: expected it before the first step(), update or "
                f"batch, found {self._gate.attempts} updates. Call it right after the iterators "
                "are made"
            )
        found = self._find_while_opening(step)
        self._may_start = True
        if found is None:
            return False
        plan = plan_restore(
            found, self._chk, path=self._chk_dir, only=only, exclude=exclude, strict=strict
        )
        plan.apply()
        self._continue_from(found, explicit=step is not None)
        self._set_positions(plan.positions)
        plan.apply_rng()
        self._apply_rng = plan.apply_rng
        self._arena.prepare()
        return True

    def _find_while_opening(self, step: int | None) -> Found | None:
        """Read and verify while the worker starts and takes the lock; reading needs none.

        What the previous run's worker still committed, or removed, meanwhile makes us look again.
        """
        if self._fresh:
            self._persistence.open()
            return None
        before = self.all_steps()
        try:
            found = self._restorer().find(step)
        except CheckFreqError:
            self._persistence.open()
            return self._restorer().find(step)
        self._persistence.open()
        return found if self.all_steps() == before else self._restorer().find(step)

    def _restorer(self) -> Restorer:
        return Restorer(
            self._chk_dir, buffers=self._restore_buffer, num_threads=self._config.writer_threads
        )

    def _restore_buffer(self, num_bytes: int) -> memoryview:
        if self._arena.slot_bytes < num_bytes:
            self._snapshotter.allocate(num_bytes)
        return memoryview(self._arena.slots[0].memory)

    def _continue_from(self, found: Found, *, explicit: bool) -> None:
        self._global_step = found.step
        self._last_started_step = found.step
        self._restored_step = found.step
        self._persistence.book.last_durable_step = found.step
        if explicit:
            self._persistence.supersede_after = found.step
        for rejected in found.rejected:
            logger.warning(
                "step %d does not validate and is quarantined: %s; going back to step %d loses "
                "%d step(s)",
                rejected.step,
                rejected.error,
                found.step,
                rejected.step - found.step,
            )
            self._persistence.quarantine(rejected.step, rejected.error)
        logger.info("restored step %d from %s", found.step, self._chk_dir)
        lost = max((r.step for r in found.rejected), default=found.step) - found.step
        self._persistence.record("restored", found.step, steps_lost=lost)

    def _set_positions(self, positions: Mapping[str, dict[str, Any]]) -> None:
        for name, state in positions.items():
            if name in self._sources:
                self._sources[name].load_state_dict(state)
            else:
                self._waiting_positions[name] = state

    # ---- iterators

    def register_position(self, name: str, source: PositionSource, /) -> None:
        """Checkpoint an iterator's position under ``name``; a restored one is applied now.

        Raises ConfigError for a name in use, or a second iterator that marks steps.
        """
        if name in self._sources:
            raise ConfigError(f"an iterator named {name!r} is registered; pass another name=")
        marking = [n for n, s in self._sources.items() if getattr(s, "marks_steps", False)]
        if marking and getattr(source, "marks_steps", False):
            raise ConfigError(
                f"iterators {marking[0]!r} and {name!r} both mark steps, so each step would count "
                "twice; pass marks_steps=False to one of them"
            )
        if name in self._waiting_positions:
            source.load_state_dict(self._waiting_positions.pop(name))
        self._sources[name] = source

    def register_pacing(self, *, chk_freq: int | None, dynamic: bool | None) -> None:
        """Take the frequency arguments given to an iterator; ConfigError if they conflict."""
        if chk_freq is not None and chk_freq != self._cadence.interval_steps:
            raise ConfigError(
                f"CFIterator(chk_freq={chk_freq}) conflicts with "
                f"CFManager(chk_freq={self._cadence.interval_steps}); give it once"
            )
        if dynamic is not None and dynamic != self._dynamic:
            raise ConfigError(
                f"CFIterator(dynamic={dynamic}) conflicts with CFManager(dynamic={self._dynamic})"
            )

    def before_first_batch(self) -> None:
        """Put the restored RNG state in place, now that the loader's iterator is built."""
        if self._apply_rng is not None and not self._iterated:
            self._apply_rng()
        self._apply_rng = None

    # ---- life

    def _begin(self, *, iterating: bool = True) -> None:
        """First use: own the directory, and refuse to run over somebody's checkpoints."""
        self._require_open()
        if not self._opened:
            self._persistence.open()
            self._opened = True
            steps = [] if self._may_start else self._persistence.store.steps()
            if steps:
                self._opened = False
                raise ConfigError(
                    f"{self._chk_dir} holds checkpoints (newest: step {steps[-1]}) and restore() "
                    "was not called. Call restore() before training, pass fresh=True to start "
                    "over, or use another directory"
                )
        self._iterated = self._iterated or iterating

    def _require_open(self) -> None:
        if self._closed:
            raise StateError(f"the manager of {self._chk_dir} is closed")

    def close(self, *, timeout_s: float | None = None) -> None:
        """Checkpoint the last boundary if it is not durable, finish, and end the worker.

        Waits at most ``timeout_s`` (default ``CFConfig.close_timeout_s``) for the worker.
        Raises what kept the last checkpoint from becoming durable. Idempotent.
        """
        self._close(clean=True, timeout_s=timeout_s)

    def _close(self, *, clean: bool, timeout_s: float | None) -> None:
        if self._closed:
            return
        limit_s = self._config.close_timeout_s if timeout_s is None else timeout_s
        try:
            self._finish(clean=clean, timeout_s=limit_s)
        finally:
            self._closed = True
            self._notice.uninstall()
            self._gate.close()
            self._snapshotter.close()
            self._persistence.close(timeout_s=limit_s)
            self._arena.close()

    def _finish(self, *, clean: bool, timeout_s: float) -> None:
        if not clean:
            self._persistence.wait_until(
                lambda: not self._persistence.book.active, timeout_s=timeout_s
            )
            return
        if not self._stopped:
            for source in self._sources.values():
                source.finish()
        if self._iterated and self._gate.at_boundary and not self._stopped:
            self._make_durable("final")
        if self._opened:
            self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self._close(clean=False, timeout_s=None)
        except CheckFreqError:  # the exception in flight must not be masked
            logger.exception("while closing after %s", kind.__name__)

    # ---- what happened

    @property
    def last_event(self) -> Event | None:
        """The latest event of this run."""
        return self._persistence.last_event

    def stats(self) -> dict[str, Any]:
        """What happened so far, as data. Times in seconds, sizes in bytes."""
        book = self._persistence.book
        return {
            "global_step": self._global_step,
            "interval_steps": self._cadence.interval_steps,
            "restored_step": self._restored_step,
            "last_durable_step": book.last_durable_step,
            "num_committed": book.num_committed,
            "num_failed": book.num_failed,
            "num_deferred": self._num_deferred,
            "num_in_flight": len(book.active),
            "num_workers_replaced": self._persistence.num_replaced,
            "state_bytes": self._snapshotter.state_bytes,
            "stall_s": self._stall_s + self._snapshotter.device_stall_s,
        }


def _cadence(mode: CFMode, chk_freq: int | None) -> ManualCadence:
    if mode is CFMode.AUTO:
        raise ConfigError(
            "CFMode.AUTO is not built yet: pass mode=CFMode.MANUAL and chk_freq=N (iterations "
            "between checkpoints; 0 for epoch boundaries only)"
        )
    if chk_freq is None:
        raise ConfigError("CFMode.MANUAL needs chk_freq=N, the iterations between checkpoints")
    return ManualCadence(chk_freq)


def _check_arguments(
    chk: CFCheckpoint, max_overhead: float, mtbf_s: float | None, tolerate_failures: int
) -> None:
    if not isinstance(chk, CFCheckpoint):
        raise ConfigError(f"chk: expected a CFCheckpoint, got {type(chk).__name__}")
    if not 0 < max_overhead < 1:
        raise ConfigError(f"max_overhead: expected a fraction between 0 and 1, got {max_overhead}")
    if mtbf_s is not None and not mtbf_s > 0:
        raise ConfigError(f"mtbf_s: expected None or seconds > 0, got {mtbf_s}")
    if tolerate_failures < 0:
        raise ConfigError(f"tolerate_failures: expected at least 0, got {tolerate_failures}")


def _usable(chk_dir: Path) -> Path:
    """Make the directory, and fail early where nothing could ever be written."""
    try:
        chk_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the checkpoint directory {chk_dir}: {error}") from error
    if not os.access(chk_dir, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the checkpoint directory {chk_dir} is not writable; mount it read-write, or change "
            "its owner or mode"
        )
    return chk_dir
