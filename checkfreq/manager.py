"""The object a training loop holds: decides at each boundary, takes snapshots, restores.

``step`` reads top down: reap what ended, count the boundary, decide, snapshot. Everything
here belongs to the training thread; the copy thread only hands a finished snapshot over.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from checkfreq.config import CFConfig
from checkfreq.console import say
from checkfreq.errors import CheckFreqError, ConfigError, PersistError, RankError, StateError
from checkfreq.events import Event
from checkfreq.forks import Home
from checkfreq.pacing.profile_cache import ProfileCache
from checkfreq.pacing.profiler import Profiler
from checkfreq.persist.attempts import Marks
from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.retention import KeepLast, RetentionPolicy
from checkfreq.policy.tuner import Due
from checkfreq.ranks.coordinator import NO_PROPOSAL, Coordinator, Decision, Proposal, SingleRank
from checkfreq.ranks.meetings import ranks_together
from checkfreq.ranks.multi_rank import MultiRank
from checkfreq.ranks.rendezvous import MAKING
from checkfreq.ranks.roles import agree_on_role, agree_on_settings
from checkfreq.restore.apply import RestorePlan, prepare
from checkfreq.restore.restorer import LoadedCheckpoint, Restorer
from checkfreq.run.checks import cadence, check_arguments, numbers, usable
from checkfreq.run.interrupt import StopNotice
from checkfreq.run.loader_deaths import is_of_dead_worker, is_of_loader
from checkfreq.run.pipeline import Pipeline
from checkfreq.snapshot.gate import UpdateGate
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.positions import Positions, PositionSource, by_name
from checkfreq.state.wrappers import was_skipped
from checkfreq.types import CFMode, Role

logger = logging.getLogger(__name__)

Closure = Callable[[], Any]

#: Exit status of a run that was told to stop, as of the iterators' ``TrainingStopped``.
_STOPPED = 75
#: How much earlier than this process its loader workers may be told to stop.
_NOTICE_S = 2.0


class CFManager:
    """Checkpoints one training run into one directory.

    ``chk_dir`` is made if needed and belongs to this run alone. ``chk`` names the state.
    ``mode`` MANUAL checkpoints every ``chk_freq`` boundaries (0: at epoch boundaries and on
    ``save`` only). ``max_overhead`` and ``mtbf_s`` (seconds) guide AUTO. ``retention`` chooses
    what to delete. Storage that fails never ends the training: each failure is an ERROR that says
    what is at risk, and tries come at pauses that grow to 5 minutes (``CFConfig.on_failure`` hears
    of it too); with a number, more than ``tolerate_failures`` failures in a row raise instead.
    ``fresh=True`` starts over in a directory that holds checkpoints: they are set aside.

    Raises ConfigError for arguments that contradict each other or a directory that cannot be
    written. Use as a context manager, or call ``close``. Not thread safe. In a fork of the process
    that made it, it says so once and does nothing: updates wait for nothing, boundaries and
    ``close`` are the parent's.
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
        tolerate_failures: int | None = None,
        fresh: bool = False,
        config: CFConfig = CFConfig(),
    ) -> None:
        meetings = ranks_together(timeout_s=config.rank_timeout_s)

        def check() -> None:
            self._cadence = cadence(mode, chk_freq)
            check_arguments(chk, tolerate_failures=tolerate_failures)
            self._policy = FrequencyPolicy(
                max_overhead=max_overhead,
                mtbf_s=mtbf_s,
                objective=config.objective,
                num_slots=config.num_slots,
            )
            self._notice = StopNotice(config.stop_signals)
            self._chk_dir = usable(Path(chk_dir))

        role = Role()
        if meetings is None:
            check()
        else:
            settings = {"mode": mode, "chk_freq": chk_freq, "fresh": fresh, "dynamic": dynamic}
            meetings.act(MAKING, check)
            agree_on_settings(meetings, {**settings, "tracked": list(chk.tracked)})
            role = agree_on_role(meetings, self._chk_dir, config=config)
        decides = self._cadence is None and role.rank == 0
        self._profiler = Profiler(
            self._policy,
            dynamic=dynamic,
            interval_steps=None if self._cadence is None else self._cadence.interval_steps,
            summary_writer=config.summary_writer if role.rank == 0 else None,
            cache=ProfileCache(self._chk_dir / "profile.json") if decides else None,
        )
        self._role = role
        self._home = Home(f"the manager of {self._chk_dir}")
        self._chk = chk
        self._config = config
        self._dynamic = dynamic
        self._fresh = fresh
        self._tolerate_failures = tolerate_failures
        self._global_step = 0
        self._is_on_device = False
        self._restored_step: int | None = None
        self._requested: Marks | None = None
        self._apply_last: Callable[[], None] | None = None
        self._opened = False
        self._may_start = fresh
        self._iterated = False
        self._is_stopping = False
        self._stopped = False
        self._is_finished = False
        self._closed = False
        self._positions = Positions(role)
        self._pipeline = Pipeline(
            self._chk_dir,
            chk,
            self._positions,
            config=config,
            retention=retention,
            tolerate_failures=tolerate_failures,
            profiler=self._profiler,
            role=role,
        )
        self._persistence = self._pipeline.persistence
        self._persistence.alarm.current_step = lambda: self._global_step
        self._ranks: Coordinator = SingleRank(self._pipeline, self._notice)
        if meetings is not None:
            self._ranks = MultiRank(
                meetings, role, self._pipeline, self._profiler, self._notice, config=config
            )
        if fresh:
            self._persistence.supersede_after = -1
        self._ranks.each(MAKING, self._persistence.start)
        self._optimizers = chk.optimizers
        self._steppers = chk.steppers
        self._gate = UpdateGate(self._optimizers, fence=self._pipeline.fence, home=self._home)
        self._gradients = self._pipeline.gradients

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
        names = self._targets(optimizer, scaler)
        if scaler is None:
            return self._step(names[0], closure)
        if closure is not None:
            raise ConfigError("weight_update: a GradScaler cannot step with a closure; pass one")
        if not any(tracked is scaler for tracked in self._chk.tracked.values()):
            raise ConfigError(
                "weight_update: the scaler is not tracked, so its scale would be lost on a "
                "restore; pass it to CFCheckpoint(scaler=...)"
            )
        for name in names:
            scaler.step(self._optimizers[name])
            self._gradients.used(name)
        self._gate.count()
        scaler.update()
        return None

    def _step(self, name: str, closure: Closure | None) -> Any:
        """Step one optimizer, through its wrapper if it has one: that may skip, or scale."""
        optimizer = self._steppers[name]
        loss = optimizer.step(closure) if closure is not None else optimizer.step()
        if optimizer is not self._optimizers[name] and was_skipped(optimizer):
            self._gradients.used(name)
            self._gate.count()
        return loss

    def _targets(
        self,
        optimizer: torch.optim.Optimizer | str | None,
        scaler: torch.amp.GradScaler | None,
    ) -> list[str]:
        tracked = self._steppers
        if optimizer is None and len(tracked) == 1:
            return list(tracked)
        names = ", ".join(tracked) or "none"
        if optimizer is None:
            if tracked and scaler is not None:
                return list(tracked)
            raise ConfigError(
                f"weight_update: expected one tracked optimizer or the name of one, found: {names}"
            )
        for name, given in tracked.items():
            if optimizer is given or optimizer is self._optimizers[name] or optimizer == name:
                return [name]
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
        if self._home.is_elsewhere():
            return
        with self._pipeline.held.boundary():
            self._require_unfinished()
            self._begin()
            self._persistence.reap()
            self._ranks.raise_failures()
            self._gate.pass_boundary()
            self._gradients.pass_boundary()
            self._global_step += 1
            self._profile(is_epoch=epoch_boundary)
            # At the first boundary: until now a signal could only end the process.
            self._notice.install()
            self._carry_out(
                self._ranks.decide(
                    self._global_step,
                    lambda: self._proposal(epoch_boundary=epoch_boundary),
                    must_meet=epoch_boundary or self._requested is not None,
                    marks=self._requested,
                )
            )

    def _profile(self, *, is_epoch: bool) -> None:
        """Tell the profiler that an iteration ended; at the first boundary, have it begin."""
        if self._profiler.has_begun:
            pipeline = self._pipeline
            self._profiler.boundary(
                is_epoch=is_epoch,
                held=pipeline.held.lap(on_device=self._is_on_device),
                is_quiet=pipeline.is_quiet,
                is_ready=pipeline.is_ready,
            )
            self._profiler.report(self._persistence, step=self._global_step)
            return
        self._ranks.each("the first boundary", self._pipeline.prepare)
        self._is_on_device = self._pipeline.is_on_device
        self._profiler.begin(
            step=self._pipeline.last_started_step,
            timer=self._pipeline.timer(),
            num_slots=self._pipeline.num_slots,
            key=self._pipeline.environment() if self._cadence is None else {},
        )

    def _proposal(self, *, epoch_boundary: bool) -> Proposal:
        """What this process would do at this boundary, were it alone."""
        if self._requested is not None:
            return Proposal("requested", must=True)
        if self._cadence is None:
            return self._proposal_by_costs()
        due = self._cadence.is_due(
            step=self._global_step,
            last_step=self._pipeline.last_started_step,
            epoch_boundary=epoch_boundary,
        )
        if due or (self._pipeline.is_deferred and self._cadence.interval_steps == 0):
            return Proposal("epoch" if epoch_boundary else "periodic")
        return NO_PROPOSAL

    def _proposal_by_costs(self) -> Proposal:
        match self._profiler.due(step=self._global_step):
            case Due.TAKE:
                return Proposal("periodic", place=self._profiler.place)
            case Due.LATE:
                return Proposal(why_late=Due.LATE.value)
        return NO_PROPOSAL

    def _carry_out(self, decision: Decision) -> None:
        if decision.defer:
            self._pipeline.defer(self._global_step, why=decision.defer)
        elif decision.reason:
            marks, self._requested = self._requested or Marks(), None
            self._ranks.take(self._global_step, decision, marks)
        if decision.stop is not None and not self._stopped:
            self._stop(decision.stop)

    def _stop(self, received: str) -> None:
        self._is_stopping = True
        logger.warning("%s received: taking the final checkpoint", received)
        self._persistence.record("stop", self._global_step, signal=received)
        self._make_durable("stop", Marks())
        self._stopped = True

    def stops_after(self, error: Exception) -> bool:
        """A loader failed: whether that is part of being told to stop, its workers being told too.

        Then the last boundary's checkpoint is durable, if it could still be made: not if a batch
        is in use. What it raises is what kept that checkpoint from becoming durable.
        """
        soon_s = _NOTICE_S if is_of_dead_worker(error) else 0.0
        if self._closed or not self._notice.comes_within(soon_s):
            return False
        logger.error("a loader failed while the run was to stop", exc_info=error)
        self._is_stopping = True
        if self._iterated and not self._stopped:
            self._stop_where_it_is()
        return True

    def _stop_where_it_is(self) -> None:
        lost = self._why_no_boundary()
        if lost is None:
            try:
                self._stop(self._notice.received or "a stop signal")
            except RankError as error:
                lost = str(error)
        if lost is not None:
            logger.warning("stopping with the checkpoints that there are: %s", lost)

    @property
    def should_stop(self) -> bool:
        """True once a stop signal came; leave the loop at the next boundary.

        Signals are watched from the first boundary on: one that comes before ends the process, as
        it would without a manager, since there is nothing to be saved yet.

        With several ranks: once they agreed on it, at the same boundary on all of them.
        """
        return self._is_stopping or (self._role.is_alone and self._notice.is_set)

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

        ``keep`` pins the checkpoint against retention; ``metrics`` are stored with it, NaN and
        infinities as they are. Of several ranks, rank 0's count; a WARNING names what differs.
        ``wait=True`` returns once it is durable, and raises StateError between boundaries or
        the PersistError of the attempt. A step is written once: a second request for the same
        step only adds its marks.

        With an iterator, a batch in use is between boundaries: its forward pass may have changed
        BatchNorm statistics and drawn random numbers.
        """
        marks = Marks(keep=keep, metrics=numbers(metrics or {}))
        if self._home.is_elsewhere():
            return
        self._begin(iterating=False)
        if why_not := self._why_no_boundary():
            if wait:
                raise StateError(
                    f"save(wait=True) between boundaries: {why_not}, so the state is not a "
                    "boundary's. Call step() first, or save() without wait to have it done at "
                    "the next boundary"
                )
            self._request(marks)
            return
        with self._pipeline.held.boundary():
            attempt = self._ranks.require(self._global_step, "requested", marks)
        if wait and (error := self._ranks.outcome(self._global_step, attempt)) is not None:
            raise error

    def _why_no_boundary(self) -> str | None:
        """What happened since the last boundary; None at one."""
        if not self._gate.at_boundary:
            return "an update was attempted since the last one"
        if (name := self._positions.using_batch()) is not None:
            return f"iterator {name!r} handed out a batch since the last one"
        return None

    def _request(self, marks: Marks) -> None:
        if self._requested is None:
            self._requested = Marks()
        self._requested.merge(marks)

    def _make_durable(self, reason: str, marks: Marks) -> None:
        """Have this boundary's checkpoint on disk; tries twice, then raises why not."""
        error = self._try_to_make_durable(reason, marks)
        if error is not None and (error := self._try_to_make_durable(reason, marks)) is not None:
            raise error

    def _try_to_make_durable(self, reason: str, marks: Marks) -> CheckFreqError | None:
        step = self._global_step
        return self._ranks.outcome(step, self._ranks.require(step, reason, marks))

    def wait(self) -> None:
        """Return once every snapshot taken so far is durable or has failed.

        Raises the latest failure if there were more in a row than ``tolerate_failures``, if that
        is a number; ``stats()["last_durable_step"]`` says what is durable.
        """
        if self._home.is_elsewhere():
            return
        self._begin(iterating=False)
        self._ranks.wait()

    def finish(self) -> None:
        """Say that the training is over, so that starting it again does not train any more.

        For a run that ends before its last epoch (early stopping, a target that is reached)::

            for epoch in train_loader.epochs(90):
                for batch in train_loader: ...
                if patience.is_over():
                    cf_manager.finish()
                    break

        Passes the boundary that an iterator still owes, has its checkpoint durable, and then notes
        durably that the run is over. From then on, and after ``restore()`` when the same script is
        started again, ``finished`` is True, iterators that mark steps hand out nothing, and
        ``step()`` raises StateError; a loop without an iterator asks ``finished``. Killed before
        that is noted, the run goes on from its last checkpoint as any other. Idempotent.

        ``restore(reopen=True)`` trains on all the same, ``restore(step=...)`` from an earlier
        step, ``fresh=True`` starts over.

        Raises StateError between boundaries, PersistError if it cannot be made durable.
        """
        if self._is_finished or self._home.is_elsewhere():
            return
        self._require_open()
        self._positions.finish()
        self._begin(iterating=False)
        if why_not := self._why_no_boundary():
            raise StateError(f"finish() between boundaries: {why_not}. Call step() first")
        marks, self._requested = self._requested or Marks(), None
        self._make_durable("final", marks)
        if not self._ranks.note_finished(self._global_step):
            raise PersistError(
                f"step {self._global_step} is durable, but not that the run is finished: the "
                f"mark could not be written to {self._chk_dir} (see the log). Call finish() again",
                step=self._global_step,
                phase="finish",
            )
        self._is_finished = True
        self._say("the run is finished at step %d", self._global_step)

    @property
    def finished(self) -> bool:
        """True once ``finish()`` was called: in this process, or before the restored step."""
        return self._is_finished

    def _require_unfinished(self) -> None:
        if self._is_finished:
            raise StateError(
                f"step() in a run that is finished (step {self._global_step}): expected no more "
                "training after finish(). Ask cf_manager.finished before the loop; to train on, "
                "restore(reopen=True)"
            )

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
        reopen: bool = False,
    ) -> bool:
        """Bring the newest valid checkpoint, or ``step``, back into the live objects.

        Returns False if the directory never held a checkpoint (a first run), or with
        ``fresh=True``. ``only`` and ``exclude`` select tracked names; ``strict=False`` loads
        what fits. Newer checkpoints that do not validate are reported and quarantined. After
        restoring an older ``step``, the first commit sets the later ones aside. If the run was
        finished with the restored step (``finish``), so it stays, unless ``reopen`` is set.

        Raises StateError once iteration began, NoCheckpointError for a step that is not there,
        CorruptCheckpointError if nothing validates, MismatchError (nothing was changed) if the
        structure differs.
        """
        if self._home.is_elsewhere():
            raise StateError(
                "restore() in a fork of the training process: expected the process that made the "
                "manager. checkfreq.load() reads a checkpoint from anywhere"
            )
        self._require_open()
        if self._iterated or self._gate.attempts:
            raise StateError(
                "restore() after iteration began: expected it before the first step(), update or "
                f"batch, found {self._gate.attempts} updates. Call it right after the iterators "
                "are made"
            )
        if self._fresh:
            self._ranks.open()
            return False
        found = self._find(step)
        if found is None:
            self._may_start = True
            if not self._role.shares_all:  # some may hold what was never one of all ranks
                self._persistence.supersede_after = -1
            return False
        compare = partial(prepare, self._chk, found, path=str(self._chk_dir))
        compare = partial(compare, rank=self._role.rank, world=self._role.world)
        compare = partial(compare, only=only, exclude=exclude, strict=strict)
        plan = self._ranks.each("restore(): comparing", compare)
        del compare
        self._load(plan)
        if only is None and not exclude:
            self._ranks.restored(found.step)
        self._may_start = True  # not earlier: a run that failed to restore must not start over
        self._continue_from(found, explicit=step is not None)
        self._take_up(reopen=reopen)
        plan.apply_last()
        self._apply_last = plan.apply_last
        state_bytes = found.state_bytes
        del found  # its buffer: the slots can have that memory
        if self._role.is_alone:
            self._pipeline.allocate(state_bytes)
        return True

    def _find(self, step: int | None) -> LoadedCheckpoint | None:
        restorer = Restorer(
            self._chk_dir,
            num_threads=self._config.writer_threads,
            before_reading=self._require_memory,
        )
        return self._ranks.find(restorer, step, chk=self._chk)

    def _require_memory(self, state_bytes: int) -> None:
        if self._role.is_alone:  # of many, each reads more, or less, than its slots will hold
            self._pipeline.require_memory(state_bytes)

    def _load(self, plan: RestorePlan) -> None:
        """Restore on all ranks; whatever may fail on one of them before what cannot."""
        undo: list[Callable[[], None]] = []

        def load() -> None:
            undo.append(self._positions.restore(by_name(plan.all_positions)))
            undo.append(plan.load())

        try:
            self._ranks.each("restore(): loading", load)
        except Exception:
            for take_back in reversed(undo):
                take_back()
            raise
        plan.copy()

    def _continue_from(self, found: LoadedCheckpoint, *, explicit: bool) -> None:
        self._global_step = found.step
        self._restored_step = found.step
        self._pipeline.continue_from(found.step, attempt=found.manifest.attempt)
        # With a directory per node, some may hold later steps that are not in all of them.
        explicit = explicit or not self._role.shares_all
        self._persistence.supersede_after = found.step if explicit else None
        for rejected in found.rejected:
            logger.warning(
                "step %d does not validate and is quarantined: %s; going back to step %d loses "
                "%d step(s)",
                rejected.step,
                rejected.error,
                found.step,
                rejected.step - found.step,
            )
            if self._role.leads and rejected.is_here:
                self._persistence.quarantine(rejected.step, rejected.error)
        self._say("restored step %d from %s", found.step, self._chk_dir)
        lost = max((r.step for r in found.rejected), default=found.step) - found.step
        self._persistence.record("restored", found.step, steps_lost=lost)

    def _take_up(self, *, reopen: bool) -> None:
        """Find out whether the run was finished, and say so or have it go on."""
        step = self._global_step
        self._is_finished = self._ranks.is_finished(step)
        if self._is_finished and reopen:
            self._is_finished = False
            self._persistence.note_finished(step, finished=False)
            self._say("the run was finished at step %d and is reopened", step)
        elif self._is_finished:
            logger.warning(
                "this run is finished: finish() was called at step %d. Nothing is trained: "
                "iterators hand out nothing. To train on, restore(reopen=True); from an earlier "
                "step, restore(step=...); to start over, fresh=True",
                step,
            )

    # ---- iterators

    def register_position(self, name: str, source: PositionSource, /) -> None:
        """Checkpoint an iterator's position under ``name``; a restored one is applied now.

        Raises ConfigError for a name in use, or a second iterator that marks steps.
        """
        self._positions.register(name, source)

    def register_pacing(self, *, chk_freq: int | None, dynamic: bool | None) -> None:
        """Take the frequency arguments given to an iterator; ConfigError if they conflict."""
        own = None if self._cadence is None else self._cadence.interval_steps
        if chk_freq is not None and chk_freq != own:
            raise ConfigError(
                f"CFIterator(chk_freq={chk_freq}) conflicts with CFManager(chk_freq={own}); give "
                "it once, with mode=CFMode.MANUAL"
            )
        if dynamic is not None and dynamic != self._dynamic:
            raise ConfigError(
                f"CFIterator(dynamic={dynamic}) conflicts with CFManager(dynamic={self._dynamic})"
            )

    def before_first_batch(self) -> None:
        """Put restored generators and gradients in place, now that the loader's iterator is built.

        Every pass until this process's first boundary begins so: a look at a batch before
        training must not shift what training draws, nor ``zero_grad()`` take what is carried over.
        """
        if self._apply_last is None or self._iterated or self._home.is_elsewhere():
            return
        self._apply_last()

    # ---- life

    def _begin(self, *, iterating: bool = True) -> None:
        """First use: own the directory, and refuse to run over somebody's checkpoints."""
        self._require_open()
        if not self._opened:
            self._ranks.open()
            self._ranks.each("the first step()", self._refuse_to_start_over)
            self._opened = True
        if iterating:
            self._iterated, self._apply_last = True, None

    def _refuse_to_start_over(self) -> None:
        steps = [] if self._may_start else self._persistence.store.steps()
        if steps:
            raise ConfigError(
                f"{self._chk_dir} holds checkpoints (newest: step {steps[-1]}) and restore() "
                "was not called. Call restore() before training, pass fresh=True to start "
                "over, or use another directory"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise StateError(f"the manager of {self._chk_dir} is closed")

    def close(self, *, timeout_s: float | None = None) -> None:
        """Checkpoint the last boundary if it is not durable, finish, and end the worker.

        Takes at most ``timeout_s`` (default ``CFConfig.close_timeout_s``); then the worker is
        killed.
        Raises what kept the last checkpoint from becoming durable, however many failures are
        tolerated. Idempotent.
        """
        self._close(timeout_s=timeout_s)

    def _close(
        self, *, timeout_s: float | None = None, failure: BaseException | None = None
    ) -> None:
        """``failure``: what ended the training; nothing but what is in flight is finished."""
        if self._closed or self._home.is_elsewhere():
            return
        clean = failure is None
        if failure is not None and not (self._stopped and isinstance(failure, SystemExit)):
            self._ranks.leave(f"{type(failure).__name__}: {failure}")
        limit_s = self._config.close_timeout_s if timeout_s is None else timeout_s
        self._pipeline.begin_close(timeout_s=limit_s)
        try:
            self._finish(clean=clean)
        except BaseException as error:
            self._ranks.leave(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._closed = True
            self._notice.uninstall()
            self._gate.close()
            try:
                self._profiler.close(clean=clean or self._stopped)
            finally:
                self._pipeline.close()
                self._ranks.close()

    def _finish(self, *, clean: bool) -> None:
        if not clean:
            self._pipeline.finish_in_flight()
            return
        if not self._stopped:
            self._positions.finish()
        if self._iterated and not self._stopped:
            self._finish_last_boundary()
        if self._opened:
            self.wait()
        if self._tolerate_failures is None:
            self._persistence.book.raise_if_last_failed()

    def _finish_last_boundary(self) -> None:
        if self._gate.at_boundary:
            self._make_durable("final", self._requested or Marks())
        elif not self._pipeline.is_written(self._global_step):
            logger.warning(
                "the last boundary, step %d, has no checkpoint and cannot get one: an update was "
                "attempted since, so the state is no boundary's any more. Call step() after the "
                "last update",
                self._global_step,
            )

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
        stops = False
        try:
            if isinstance(error, Exception) and is_of_loader(error):
                stops = self.stops_after(error)
        except Exception:
            logger.exception("while stopping after %s", kind.__name__)
        try:
            self._close(failure=SystemExit(_STOPPED) if stops else error)
        except Exception:  # the one in flight must not be masked
            logger.exception("while closing after %s", kind.__name__)
        if stops:
            raise SystemExit(_STOPPED) from error

    # ---- what happened

    def _say(self, message: str, *args: object) -> None:
        say(logger, message, *args, is_shown=self._role.rank == 0)

    @property
    def last_event(self) -> Event | None:
        """The latest event of this run."""
        return self._persistence.last_event

    def stats(self) -> dict[str, Any]:
        """What happened so far, as data. Times in seconds, sizes in bytes."""
        book = self._persistence.book
        return {
            **self._profiler.stats(),
            "place": self._pipeline.place.value if self._opened else None,
            "global_step": self._global_step,
            "restored_step": self._restored_step,
            "last_durable_step": book.last_durable_step,
            "num_committed": book.num_committed,
            "num_failed": book.num_failed,
            "num_deferred": self._pipeline.num_deferred,
            "num_in_flight": len(book.active),
            "num_workers_replaced": self._persistence.num_replaced,
            "state_bytes": self._pipeline.state_bytes,
            "stall_s": self._pipeline.held.checkpoints_s,
        }
