"""The object a training loop holds: decides at each boundary, takes snapshots, restores.

The public contract, and the order of a boundary: reap attempts that ended, count the step, decide,
take a snapshot. What a run is made of and how it updates, restores and ends is in ``session/``.
Everything here belongs to the training thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from checkfreq.config import CFConfig
from checkfreq.crashtest.attach import recorder_for, redirected
from checkfreq.errors import ConfigError, StateError
from checkfreq.events import Event
from checkfreq.keyboard import KEYBOARD, uninterrupted
from checkfreq.mirror.settings import Mirror
from checkfreq.persist.attempts import Marks
from checkfreq.persist.client import takeover_s
from checkfreq.policy.best import BestName
from checkfreq.policy.retention import DEFAULT_RETENTION, RetentionPolicy
from checkfreq.policy.tuner import Verdict
from checkfreq.ranks.coordinator import NO_PROPOSAL, Decision, Proposal
from checkfreq.restore.peek import Peek, peek
from checkfreq.run.checks import numbers
from checkfreq.run.loader_deaths import is_of_loader
from checkfreq.session.arguments import Arguments
from checkfreq.session.ending import Ending
from checkfreq.session.restoring import Restoring
from checkfreq.session.session import Session
from checkfreq.session.staging import staged
from checkfreq.session.updates import WeightUpdates
from checkfreq.snapshot.gate import opaque
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.positions import PositionSource
from checkfreq.types import CFMode

logger = logging.getLogger(__name__)

Closure = Callable[[], Any]

#: Exit status of a run that was told to stop, the same as the iterators' ``TrainingStopped``.
_STOPPED = 75


class CFManager:
    """Checkpoints one training run into one directory.

    Arguments
        chk_dir: the directory of this run alone; created if it does not exist; "~" is the home
            directory. Or a URL such as "s3://bucket/run": then a directory under
            ``CFConfig.staging_dir``, mirrored there.
        chk: the state to checkpoint.
        mode: AUTO chooses the interval from measured costs; MANUAL takes it from ``chk_freq``.
        chk_freq: boundaries between checkpoints in MANUAL; 0 checkpoints at epoch boundaries and
            on ``save`` only.
        max_overhead: the bound in AUTO: the fraction of training time that periodic checkpoints
            may add.
        dynamic: adapt the interval while training runs, rather than keep the first one chosen.
        mtbf_s: mean time between failures in seconds; AUTO then does not checkpoint more often
            than pays off.
        retention: which checkpoints to keep. Default: the last 3, the first of each hour for a day,
            and the first of each day (UTC) for ever, the oldest of which give way where the disk
            has no room. Pinned ones and the newest are always kept.
        tolerate_failures: None never lets failing storage end the training: each failure is logged
            as an ERROR that says what is at risk and passed to ``CFConfig.on_failure``, and retries
            come at pauses that grow to 5 minutes. With a number, more failures in a row raise.
        fresh: start over in a directory that holds checkpoints, which are set aside.
        config: every other setting.

    Raises ConfigError for arguments that contradict each other, or a directory that cannot be
    written. Use it as a context manager, or call ``close``. Not thread-safe. In a fork of the
    process that made it, a manager warns once and does nothing: updates do not wait, and
    boundaries and ``close`` are the parent's.
    """

    def __init__(
        self,
        chk_dir: str | bytes | os.PathLike[str],
        chk: CFCheckpoint,
        *,
        mode: CFMode = CFMode.AUTO,
        chk_freq: int | None = None,
        max_overhead: float = 0.035,
        dynamic: bool = True,
        mtbf_s: float | None = None,
        retention: RetentionPolicy = DEFAULT_RETENTION,
        tolerate_failures: int | None = None,
        fresh: bool = False,
        config: CFConfig = CFConfig(),
    ) -> None:
        chk_dir, config = redirected(chk_dir, config)
        arguments = Arguments(
            chk_dir=chk_dir,
            chk=chk,
            mode=mode,
            chk_freq=chk_freq,
            max_overhead=max_overhead,
            dynamic=dynamic,
            mtbf_s=mtbf_s,
            retention=retention,
            tolerate_failures=tolerate_failures,
            fresh=fresh,
            config=config,
        )
        KEYBOARD.attach()
        try:
            with KEYBOARD:
                session = Session(arguments)
        except BaseException:
            KEYBOARD.detach()
            raise
        self._session = session
        self._progress = session.progress
        self._home = session.home
        self._cadence = session.cadence
        self._notice = session.notice
        self._profiler = session.profiler
        self._pipeline = session.pipeline
        self._persistence = session.persistence
        self._coordinator = session.coordinator
        self._gate = session.gate
        self._untracked, self._unseen = session.untracked, session.unseen
        self._evidence = session.pipeline.evidence
        self._reporter = session.reporter
        self._gradients = session.pipeline.gradients
        self._updates = WeightUpdates(session)
        self._restoring = Restoring(session)
        self._ending = Ending(session)
        self._is_on_device = False
        self._recorder = recorder_for(session, save=self.save)  # None but under a crash test
        passes = self._pass_recorded if self._recorder else self._pass_boundary
        self._pass = opaque(uninterrupted(passes))

    # ---- weight updates

    @uninterrupted
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
        self._session.require_whole()
        return self._updates.update(optimizer, scaler, closure)

    def updating(self) -> AbstractContextManager[None]:
        """Bracket every parameter write that goes through no tracked ``optimizer.step()``.

        CUDA graph replays, weight clipping, EMA swaps, optimizers inside backward. Without it, a
        write under the copy of a snapshot fails that snapshot, and others hold training until they
        are complete. Enter it with the stream current on which the write is queued.
        """
        self._session.require_whole()
        return self._gate.updating()

    @property
    def update_attempts(self) -> int:
        """Weight updates attempted in this process, including skipped ones."""
        return self._gate.attempts

    # ---- boundaries

    def step(self) -> None:
        """Pass an iteration boundary: after a weight update and before the next batch.

        CFIterator calls it; a loop without one calls it once per update. Without an update since
        the boundary before, a snapshot is complete when this returns, which takes longer. Raises
        errors of the background work, and ConfigError at the first call if the directory holds
        checkpoints and ``restore`` was not called.
        """
        self._pass(epoch_boundary=False)

    def end_epoch(self) -> None:
        """Pass the last boundary of an epoch."""
        self._pass(epoch_boundary=True)

    def _pass_boundary(self, *, epoch_boundary: bool) -> None:
        if self._home.is_elsewhere():
            return
        KEYBOARD.listen()
        with self._pipeline.held.boundary():
            self._require_unfinished()
            self._session.begin()
            self._persistence.reap()
            self._coordinator.raise_failures()
            self._gate.pass_boundary()
            self._evidence.pass_boundary(self._gate.attempts)
            self._untracked.pass_boundary()
            self._unseen.pass_boundary()
            self._session.last_moment.pass_boundary(is_epoch_end=epoch_boundary)
            self._session.say_news()
            self._gradients.pass_boundary()
            self._progress.global_step += 1
            self._reporter.pass_boundary(self._progress.global_step)
            if epoch_boundary:
                self._pipeline.last_epoch_end = self._progress.global_step
            self._profile(is_epoch=epoch_boundary)
            self._notice.install()  # at the first boundary: before it there is nothing to save
            self._carry_out(
                self._coordinator.decide(
                    self._progress.global_step,
                    lambda: self._proposal(epoch_boundary=epoch_boundary),
                    must_meet=epoch_boundary or self._progress.requested is not None,
                    marks=self._progress.requested,
                )
            )

    def _pass_recorded(self, *, epoch_boundary: bool) -> None:
        self._pass_boundary(epoch_boundary=epoch_boundary)
        if self._recorder is not None:
            self._recorder.pass_boundary(self._progress.global_step)

    def _profile(self, *, is_epoch: bool) -> None:
        """Tell the profiler that an iteration ended; at the first boundary, start it."""
        if self._profiler.has_begun:
            pipeline = self._pipeline
            pipeline.pin_slots()
            self._profiler.boundary(
                is_epoch=is_epoch,
                held=pipeline.held.lap(on_device=self._is_on_device),
                is_quiet=pipeline.is_quiet,
                is_ready=pipeline.is_ready,
            )
            self._profiler.report(self._persistence, step=self._progress.global_step)
            return
        self._coordinator.each("the first boundary", self._pipeline.prepare)
        self._pipeline.pin_slots()
        self._is_on_device = self._pipeline.is_on_device
        self._profiler.begin(
            step=self._pipeline.last_started_step,
            timer=self._pipeline.timer(),
            num_slots=self._pipeline.num_slots,
            key=self._pipeline.environment() if self._cadence is None else {},
        )

    def _proposal(self, *, epoch_boundary: bool) -> Proposal:
        """What this rank would do at this boundary."""
        if self._progress.requested is not None:
            return Proposal("requested", must=True)
        if epoch_boundary and self._session.wants_epoch_ends:
            return Proposal("epoch", must=True)
        if self._cadence is None:
            return self._proposal_by_costs()
        due = self._cadence.is_due(
            step=self._progress.global_step,
            last_step=self._pipeline.last_started_step,
            epoch_boundary=epoch_boundary,
        )
        if due or (self._pipeline.is_deferred and self._cadence.interval_steps == 0):
            return Proposal("epoch" if epoch_boundary else "periodic")
        return NO_PROPOSAL

    def _proposal_by_costs(self) -> Proposal:
        match self._profiler.due(step=self._progress.global_step):
            case Verdict.TAKE:
                return Proposal("periodic", place=self._profiler.place)
            case Verdict.LATE:
                return Proposal(why_late=Verdict.LATE.value)
        return NO_PROPOSAL

    def _carry_out(self, decision: Decision) -> None:
        if decision.defer:
            self._pipeline.defer(self._progress.global_step, why=decision.defer)
        elif decision.reason:
            self._coordinator.take(
                self._progress.global_step, decision, self._progress.take_requested()
            )
        if decision.stop is not None and not self._progress.has_stopped:
            self._ending.stop(decision.stop)

    @uninterrupted
    def reopens_after(self, error: Exception) -> bool:
        """Whether a loader, which failed because the run was told to stop, is needed once more.

        So it is where other ranks are in the midst of an iteration that this one has to take part
        in, and where batches are in use: the run stops at the next boundary, not here.
        """
        return self._ending.reopens_after(error)

    @uninterrupted
    def stops_after(self, error: Exception) -> bool:
        """Whether a loader failed because the run was told to stop, and its workers with it.

        If so, the last boundary's checkpoint is durable when this returns, unless a batch was in
        use and it could no longer be taken. Raises what kept it from becoming durable.
        """
        return self._ending.stops_after(error)

    @property
    def should_stop(self) -> bool:
        """True once a stop signal was received, or the run's end is near; leave the loop at the
        next boundary.

        Signals are handled from the first boundary on: an earlier one ends the process as it would
        without a manager, since there is nothing to save yet. With several ranks it becomes true on
        all of them at the same boundary.
        """
        return self._progress.is_stopping or (self._session.role.is_alone and self._notice.is_set)

    @property
    def stopped(self) -> bool:
        """True once the run was told to stop, or its end is near, and the last checkpoint is
        durable.
        """
        return self._progress.has_stopped

    @property
    def global_step(self) -> int:
        """Boundaries passed since training began, including those before a restore."""
        return self._progress.global_step

    # ---- checkpoints

    @uninterrupted
    def save(
        self, *, wait: bool = False, keep: bool = False, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Checkpoint at this boundary; between boundaries, at the next one.

        ``keep`` exempts the checkpoint from retention; ``metrics`` are stored with it, NaN and
        infinities included. With several ranks, rank 0's metrics are stored, and a WARNING names
        those that differ. ``wait=True`` returns once the checkpoint is durable; it raises
        StateError between boundaries, and PersistError if the attempt fails. Each step is
        written only once, so a second request for the same step just adds its marks.

        With an iterator, the time while a batch is in use is between boundaries: the forward pass
        may have changed BatchNorm statistics and drawn random numbers.
        """
        marks = Marks(keep=keep, metrics=numbers(metrics or {}))
        if self._home.is_elsewhere():
            return
        self._session.begin(iterating=False)
        if why_not := self._session.why_no_boundary():
            if wait:
                raise StateError(
                    f"save(wait=True) between boundaries: {why_not}, so the state is not a "
                    "boundary's. Call step() first, or save() without wait to have it done at "
                    "the next boundary"
                )
            self._progress.request(marks)
            return
        step = self._progress.global_step
        with self._pipeline.held.boundary():
            attempt = self._coordinator.require(step, "requested", marks)
        if wait and (error := self._coordinator.outcome(step, attempt)) is not None:
            raise error

    @uninterrupted
    def wait(self) -> None:
        """Return once every snapshot taken so far is durable or has failed.

        Raises the latest failure if ``tolerate_failures`` is a number and more failed in a row;
        ``stats()["last_durable_step"]`` is the newest durable step.
        """
        if self._home.is_elsewhere():
            return
        self._session.begin(iterating=False)
        self._coordinator.wait()

    @uninterrupted
    def finish(self) -> None:
        """Mark the run as finished, so that starting it again trains no further.

        For a run that ends before its last epoch (early stopping, a target reached)::

            for epoch in train_loader.epochs(90):
                for batch in train_loader: ...
                if patience.is_over():
                    cf_manager.finish()
                    break

        Passes the boundary that an iterator still owes, makes its checkpoint durable, and then
        durably marks the run as finished. From then on, and after ``restore()`` when the same
        script is started again, ``finished`` is True, iterators that mark steps yield nothing, and
        ``step()`` raises StateError; a loop without an iterator checks ``finished``. A run killed
        before the mark is durable resumes from its last checkpoint like any other. Idempotent.

        To train further use ``restore(reopen=True)``, ``restore(step=...)`` for an earlier step, or
        ``fresh=True`` to start over. With several ranks, all of them call it.

        Raises StateError between boundaries, PersistError if the mark cannot be made durable.
        """
        if self._progress.is_finished or self._home.is_elsewhere():
            return
        self._ending.finish()

    @property
    def finished(self) -> bool:
        """True once ``finish()`` was called: in this process, or before the restored step."""
        return self._progress.is_finished

    def _require_unfinished(self) -> None:
        if self._progress.is_finished:
            raise StateError(
                f"step() in a run that is finished (step {self._progress.global_step}): expected "
                "no more training after finish(). Ask cf_manager.finished before the loop; to "
                "train on, restore(reopen=True)"
            )

    def latest_step(self) -> int | None:
        """The newest committed step in the directory or its mirror; None if there is none."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """All committed steps in the directory, and in its mirror if there is one, ascending."""
        return self._session.steps()

    def best_step(self, metric: str, *, highest: bool | None = None) -> int | None:
        """The committed step with the best ``metric``; None if none has a finite value of it.

        Metrics are given with ``save(metrics={...})``; NaN and infinities never win, and the newer
        of two equal values does. The best is the lowest value, or the highest with
        ``highest=True``; None takes what a ``KeepBest`` of this metric in ``retention`` says, else
        the lowest. Reads the directory and its mirror: a checkpoint in flight does not count
        yet, see ``wait``.
        """
        if self._progress.is_open and not self._progress.is_closed:
            self._pipeline.wait_answered()
        name = BestName(metric, highest)
        return self._persistence.best_step(name, remote=self._session.remote())

    # ---- restore

    @staticmethod
    def peek(
        chk_dir: str | bytes | os.PathLike[str],
        *,
        step: int | None = None,
        config: CFConfig = CFConfig(),
    ) -> Peek | None:
        """What ``restore`` would load, before there are objects; None if there is no checkpoint.

        For a script whose objects depend on how far training had come, as where a frozen part is
        thawed and its parameters become a new group of the optimizer::

            saved = CFManager.peek("chk/")
            if saved is not None and len(saved.param_groups["optimizer"]) > 1:
                thaw(model, optimizer)
            cf_manager = CFManager("chk/", CFCheckpoint(model=model, optimizer=optimizer))

        ``chk_dir`` and ``config`` are those of the manager. Reads records, not tensors. Waits for
        the worker of a killed run to finish, for ``CFConfig.takeover_s`` at most. With several
        ranks each calls it for itself. Raises what ``restore`` raises for unreadable checkpoints.
        """
        path, config = staged(*redirected(chk_dir, config))
        return peek(path, Mirror.of(config.mirror), step=step, wait_s=takeover_s(config))

    @uninterrupted
    def restore(
        self,
        step: int | str | None = None,
        *,
        only: Collection[str] | None = None,
        exclude: Collection[str] = (),
        keep: Collection[str] = (),
        strict: bool = True,
        reopen: bool = False,
    ) -> bool:
        """Load the newest valid checkpoint, or that of ``step``, into the live objects.

        With a mirror, the newest of the directory and the mirror; the directory's if both have it.
        ``step`` is a number, or ``"best:METRIC"`` for the step that ``best_step`` returns, with
        ``:min`` or ``:max`` behind it to say which value is the best.

        Returns False if the directory never held a checkpoint (a first run), or with
        ``fresh=True``. ``only`` and ``exclude`` select tracked names; ``strict=False`` loads
        what fits. ``keep`` names values of the script that stand, such as
        ``keep=("scheduler.T_max", "optimizer.lr")`` for a longer schedule and a new rate: a WARNING
        names those that differ from the run's first start.

        Newer checkpoints that do not validate are reported and quarantined; one that cannot be read
        is reported and left as it is. After restoring an older ``step``, or past one that cannot be
        read, the first commit sets the later ones aside. A run that was finished at the
        restored step stays finished unless ``reopen`` is set.

        Raises StateError once iteration began, NoCheckpointError for a step that does not exist,
        MismatchError if the structure differs (nothing was changed), and CorruptCheckpointError if
        nothing validates. A tensor's digest is checked as it is read into its place. If no older
        checkpoint can be loaded over one that turns out damaged, the error says that live objects
        hold parts of it, and every later call raises StateError; see also
        ``CFConfig.verify_before_load``. Reading does not wait for the persist worker's start:
        where the directory cannot be opened after all (ConfigError, StorageError), live objects
        may hold the checkpoint already, whole.
        """
        if self._home.is_elsewhere():
            raise StateError(
                "restore() in a fork of the training process: expected the process that made the "
                "manager. checkfreq.load() reads a checkpoint from anywhere"
            )
        self._session.require_open()
        if self._progress.has_iterated or self._gate.attempts:
            raise StateError(
                "restore() after iteration began: expected it before the first step(), update or "
                f"batch, found {self._gate.attempts} updates. Call it right after the iterators "
                "are made"
            )
        restored = self._restoring.restore(
            step, only=only, exclude=exclude, keep=keep, strict=strict, reopen=reopen
        )
        if self._recorder is not None:
            self._recorder.begin(self._progress.global_step)
        return restored

    # ---- iterators

    @uninterrupted
    def register_position(self, name: str, source: PositionSource, /) -> None:
        """Checkpoint an iterator's position under ``name``; if one was restored, apply it now.

        Raises ConfigError for a name in use, or a second iterator that marks steps.
        """
        self._session.require_whole()
        self._session.positions.register(name, source)

    def register_pacing(self, *, chk_freq: int | None, dynamic: bool | None) -> None:
        """Take the frequency arguments given to an iterator; ConfigError if they conflict."""
        own = None if self._cadence is None else self._cadence.interval_steps
        if chk_freq is not None and chk_freq != own:
            raise ConfigError(
                f"CFIterator(chk_freq={chk_freq}) conflicts with CFManager(chk_freq={own}); give "
                "it once, with mode=CFMode.MANUAL"
            )
        if dynamic is not None and dynamic != (given := self._session.arguments.dynamic):
            raise ConfigError(
                f"CFIterator(dynamic={dynamic}) conflicts with CFManager(dynamic={given})"
            )

    @property
    def on_delivery(self) -> Callable[[str, Any], None] | None:
        """What iterators tell of each batch that they hand out; None but under a crash test."""
        return None if self._recorder is None else self._recorder.delivered

    def holding_interrupts(self) -> AbstractContextManager[None]:
        """A context in which Ctrl-C is held back; iterators move their positions in it."""
        KEYBOARD.listen()
        return KEYBOARD

    @uninterrupted
    def before_first_batch(self) -> None:
        """Put restored generators and gradients in place once more, before the first batch.

        Building a loader's iterator may draw random numbers. Every pass until this process's first
        boundary starts here: looking at a batch before training must not shift what training
        draws, nor may ``zero_grad()`` discard gradients that were carried over.
        """
        self._session.require_whole()
        progress = self._progress
        if progress.has_iterated or self._home.is_elsewhere():
            return
        if progress.apply_last is not None:
            progress.apply_last()
        self._unseen.before_first_batch()

    def no_update(self, num_batches: int, *, epoch_over: bool) -> None:
        """Warn that an iterator handed out so many batches, and no weight update was seen."""
        self._unseen.no_update(num_batches, epoch_over=epoch_over)
        self._untracked.no_boundary()

    # ---- life

    @uninterrupted
    def close(self, *, timeout_s: float | None = None) -> None:
        """Make the last boundary durable, finish what is in flight, and end the worker.

        Takes at most ``timeout_s`` (default ``CFConfig.close_timeout_s``); then the worker is
        killed. Raises what kept the last checkpoint from becoming durable, however many failures
        are tolerated. Idempotent.
        """
        self._ending.close(timeout_s=timeout_s)
        if self._recorder is not None:
            self._recorder.end()

    def __enter__(self) -> Self:
        return self

    @uninterrupted
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
            self._ending.close(failure=SystemExit(_STOPPED) if stops else error)
        except Exception:  # it must not mask the exception in flight
            logger.exception("while closing after %s", kind.__name__)
        if stops:
            raise SystemExit(_STOPPED) from error

    # ---- statistics

    @property
    def last_event(self) -> Event | None:
        """The latest event of this run."""
        return self._persistence.last_event

    def stats(self) -> dict[str, Any]:
        """What happened so far, as data; times in seconds, sizes in bytes."""
        return {
            **self._profiler.stats(),
            "place": self._pipeline.place.value if self._progress.is_open else None,
            "global_step": self._progress.global_step,
            "restored_step": self._progress.restored_step,
            "restored_from": self._progress.restored_from,
            **self._persistence.stats(),
            "num_deferred": self._pipeline.num_deferred,
            "state_bytes": self._pipeline.state_bytes,
            "stall_s": self._pipeline.held.checkpoints_s,
        }
