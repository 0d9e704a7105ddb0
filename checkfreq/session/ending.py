"""How a run ends: a stop signal, ``finish()``, ``close()``, or an exception that passes through."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace

from checkfreq.errors import DirectoryBusyError, PersistError, RankError, StateError
from checkfreq.events import StopRecord
from checkfreq.keyboard import KEYBOARD
from checkfreq.notices.requeue import requeue
from checkfreq.notices.slurm import num_restarts
from checkfreq.persist.attempts import Marks
from checkfreq.run.loader_deaths import is_of_dead_worker
from checkfreq.run.notices import Stop
from checkfreq.session.session import Session
from checkfreq.supervisor.board import State

logger = logging.getLogger("checkfreq.manager")

_SOME_SIGNAL = Stop("a stop signal", "a stop signal received")
#: How much earlier than this process its loader workers may be told to stop.
_NOTICE_S = 2.0
#: A signal that is sent again may end the new workers as well.
_MOST_REOPENED = 3


class Ending:
    """Sees to it that the last state is durable, whichever way the run ends."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._progress = session.progress
        self._pipeline = session.pipeline
        self._coordinator = session.coordinator
        self._stopped_by = ""
        self._num_reopened = 0

    # ---- told to stop

    def stop(self, stop: Stop) -> None:
        """Take the final checkpoint."""
        self._progress.is_stopping = True
        self._stopped_by = stop.source
        ends_in_s = stop.ends_in_s
        left = "" if ends_in_s is None else f", {max(0.0, ends_in_s):.0f} s before the end"
        logger.warning("%s: taking the final checkpoint%s", stop.why, left)
        ends_at_unix_s = None if ends_in_s is None else time.time() + ends_in_s
        self._session.last_moment.stopping(stop, self._pipeline.needs())
        record = StopRecord(
            stop.source, stop.why, self._progress.global_step, False, ends_at_unix_s
        )
        self._session.profiler.asked_to_end()
        self._session.persistence.record("stop", record.step, signal=stop.source)
        self._tell(record)
        self._session.make_durable("stop", Marks())
        self._progress.has_stopped = True
        self._session.reporter.end(State.STOPPED)
        self._tell(replace(record, is_durable=True))

    def _tell(self, record: StopRecord) -> None:
        on_stop = self._session.config.on_stop
        if on_stop is None:
            return
        try:
            on_stop(record)
        except Exception:  # the user's own, which must not cost the last checkpoint
            logger.exception("CFConfig.on_stop raised at step %d", record.step)

    def reopens_after(self, error: Exception) -> bool:
        """See `CFManager.reopens_after`."""
        progress, session = self._progress, self._session
        if not is_of_dead_worker(error) or progress.is_closed or progress.has_stopped:
            return False
        stops_here = session.role.is_alone and session.why_no_boundary() is None
        if stops_here or self._num_reopened == _MOST_REOPENED:
            return False
        if not session.notice.comes_within(_NOTICE_S):
            return False
        self._num_reopened += 1
        logger.warning(
            "the stop signal ended loader workers too; starting others for the batches up to the "
            "next boundary of all ranks: %s",
            error,
        )
        return True

    def stops_after(self, error: Exception) -> bool:
        """See `CFManager.stops_after`."""
        soon_s = _NOTICE_S if is_of_dead_worker(error) else 0.0
        if self._progress.is_closed or not self._session.notice.comes_within(soon_s):
            return False
        logger.error("a loader failed while the run was to stop", exc_info=error)
        self._progress.is_stopping = True
        if self._progress.has_iterated and not self._progress.has_stopped:
            self._stop_where_it_is()
        return True

    def _stop_where_it_is(self) -> None:
        lost = self._session.why_no_boundary()
        if lost is None:
            try:
                self.stop(self._session.last_moment.signalled() or _SOME_SIGNAL)
            except RankError as error:
                lost = str(error)
        if lost is not None:
            logger.warning("stopping with the checkpoints that there are: %s", lost)

    # ---- finished

    def finish(self) -> None:
        """See `CFManager.finish`."""
        session, progress = self._session, self._progress
        session.require_open()
        session.positions.finish()
        session.begin(iterating=False)
        if why_not := session.why_no_boundary():
            raise StateError(f"finish() between boundaries: {why_not}. Call step() first")
        session.make_durable("final", progress.take_requested())
        # The mark comes after the checkpoint it is about: a kill between the two resumes the run.
        if not self._coordinator.note_finished(progress.global_step):
            raise PersistError(
                f"step {progress.global_step} is durable, but not that the run is finished: the "
                f"mark could not be written to {session.chk_dir} (see the log). Call finish() "
                "again",
                step=progress.global_step,
                phase="finish",
            )
        progress.is_finished = True
        session.say("the run is finished at step %d", progress.global_step)

    # ---- closed

    def close(
        self, *, timeout_s: float | None = None, failure: BaseException | None = None
    ) -> None:
        """``failure``: what ended the training; nothing but what is in flight is finished."""
        session, progress = self._session, self._progress
        if progress.is_closed or session.home.is_elsewhere():
            return
        clean, could_not_begin = failure is None, self._could_not_begin(failure)
        if failure is not None and not (progress.has_stopped and isinstance(failure, SystemExit)):
            self._coordinator.leave(f"{type(failure).__name__}: {failure}")
        limit_s = session.config.close_timeout_s if timeout_s is None else timeout_s
        session.last_moment.closing(has_stopped=progress.has_stopped)
        self._pipeline.begin_close(timeout_s=limit_s)
        try:
            self._complete(clean=clean)
        except BaseException as error:
            self._coordinator.leave(f"{type(error).__name__}: {error}")
            raise
        finally:
            progress.is_closed = True
            session.reporter.end(self._state(clean=clean))
            if progress.is_open:
                how = self._state(clean=clean).name.lower()
                why = None if failure is None else type(failure).__name__
                session.persistence.record("ended", progress.global_step, how=how, error=why)
            session.gate.close()
            try:
                was_asked = progress.is_stopping or isinstance(failure, KeyboardInterrupt)
                session.profiler.close(clean=clean or was_asked)
            finally:
                try:
                    if not session.restores_from_mirror:
                        self._requeue(could_not_begin=could_not_begin)
                    self._pipeline.close()
                    self._coordinator.close()
                finally:  # last: a signal must not end a process that is about to end well
                    session.notice.uninstall(has_stopped=progress.has_stopped)
                    KEYBOARD.detach()
        if session.restores_from_mirror:
            self._requeue(could_not_begin=could_not_begin)

    def _state(self, *, clean: bool) -> State:
        """What is told to ``checkfreq run``."""
        if self._progress.is_finished:
            return State.FINISHED
        if self._progress.has_stopped:
            return State.STOPPED
        if self._progress.is_cut_off:
            return State.CUT_OFF
        return State.CLOSED if clean else State.FAILED

    def _could_not_begin(self, failure: BaseException | None) -> bool:
        """Whether a later start may do what this one could not.

        Another run, such as one on a node that SLURM has lost, has the directory; or checkpoints
        cannot be reached, and an earlier start of this job reached them.
        """
        was_cut_off = failure is not None and self._progress.is_cut_off
        return isinstance(failure, DirectoryBusyError) or (
            was_cut_off and num_restarts(os.environ) > 0
        )

    def _requeue(self, *, could_not_begin: bool) -> None:
        """Put the job back into SLURM's queue, which then ends the processes.

        Every rank's part is durable: ``stop`` waited for all of them. An upload goes on until SLURM
        ends it, and is finished by the next run, unless that may need it. The user's own deadline
        ends the run for good: the next job would have the same one.
        """
        session, progress = self._session, self._progress
        wanted = session.config.requeue and session.role.rank == 0
        is_over = progress.is_finished or self._stopped_by.startswith("deadline")
        if wanted and (could_not_begin or progress.has_stopped) and not is_over:
            requeue(os.environ)

    def _complete(self, *, clean: bool) -> None:
        if not clean:
            self._pipeline.finish_in_flight()
            return
        if not self._progress.has_stopped:
            self._session.positions.finish()
        if not self._progress.has_iterated and self._progress.restored_step is None:
            self._session.unseen.close(self._session.gate.attempts)
        was_begun = self._progress.has_iterated or self._progress.restored_step is not None
        if was_begun and not self._progress.has_stopped:
            self._complete_last_boundary()
        if self._progress.is_open:
            self._session.begin(iterating=False)
            self._coordinator.wait()
        elif self._progress.restored_step is not None and self._session.role.is_alone:
            self._coordinator.wait()  # the run before may have left some in flight
        if self._session.arguments.tolerate_failures is None:
            self._session.persistence.raise_if_last_failed()

    def _complete_last_boundary(self) -> None:
        step = self._progress.global_step
        if self._session.gate.at_boundary:
            if self._progress.has_iterated:
                self._pipeline.verify()
                self._session.make_durable("final", self._progress.requested or Marks())
        elif self._progress.has_iterated and not self._pipeline.is_written(step):
            logger.warning(
                "the last boundary, step %d, has no checkpoint and cannot get one: an update was "
                "attempted since, so the state is no boundary's any more. Call step() after the "
                "last update",
                step,
            )
        else:
            logger.warning(
                "the last update is in no checkpoint: no boundary was passed after it, and the "
                "newest checkpoint is of step %d. Call step() after the last update",
                step,
            )
