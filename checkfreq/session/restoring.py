"""How a run goes on from a checkpoint: find it, load it on all ranks, take it up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

from checkfreq.errors import CheckFreqError, CorruptCheckpointError, is_outage
from checkfreq.policy.best import BestName
from checkfreq.ranks.coordinator import Restored
from checkfreq.restore.apply import RestorePlan, prepare
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.in_place import InPlace
from checkfreq.restore.load import require_memory
from checkfreq.restore.restorer import Restorer
from checkfreq.session.session import Session
from checkfreq.state.positions import by_name
from checkfreq.store.marks import StepMark
from checkfreq.store.source import NONE_VALID, Rejected
from checkfreq.supervisor.board import State

logger = logging.getLogger("checkfreq.manager")


class Restoring:
    """The restore of a run. Nothing is changed on any rank until all have compared."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._progress = session.progress
        self._pipeline = session.pipeline
        self._persistence = session.persistence
        self._coordinator = session.coordinator
        self._role = session.role
        #: An agent copies the files of the directory one by one, from and to other storage.
        self._is_copied = session.config.agent_copies_within_s is not None

    def restore(
        self,
        step: int | str | None,
        *,
        only: Collection[str] | None,
        exclude: Collection[str],
        keep: Collection[str],
        strict: bool,
        reopen: bool,
    ) -> bool:
        """See `CFManager.restore`."""
        if self._session.arguments.fresh:
            self._coordinator.open()
            return False
        number = self._best(BestName.parse(step)) if isinstance(step, str) else step
        compare = partial(
            prepare,
            self._session.chk,
            path=str(self._session.chk_dir),
            rank=self._role.rank,
            world=self._role.world,
            only=only,
            exclude=exclude,
            keep=keep,
            strict=strict,
            trusts=self._session.config.trust_extra_state,
        )
        restored = self._load(number, self._loading(compare))
        if restored is None:
            self._start_anew()
            return False
        found, plan = restored
        self._pipeline.inheritance.let_go()
        if only is None and not exclude:
            self._coordinator.restored(found.step)
        # Not earlier: a run that failed to restore must not start over.
        self._progress.may_start = True
        self._continue_from(found, explicit=step is not None)
        self._take_up(found, reopen=reopen)
        plan.apply_last()
        self._pipeline.gradients.restored(plan.with_gradients)
        self._progress.apply_last = plan.apply_last
        if self._role.is_alone:  # of many, each holds more, or less, than it has read
            self._pipeline.allocate(found.state_bytes)
        return True

    # ---- before anything changes

    def _best(self, name: BestName) -> int:
        # Opened first: until then a worker of the run before may still write marks.
        self._coordinator.open()
        best: int = self._coordinator.ask_first(
            "restore(): finding the best step",
            lambda: self._persistence.require_best(name, remote=self._session.remote()),
        )
        return best

    def _loading(self, compare: Callable[[FoundCheckpoint], RestorePlan]) -> InPlace:
        def set_positions(plan: RestorePlan) -> Callable[[], None]:
            return self._session.positions.restore(by_name(plan.all_positions))

        def compare_if_it_fits(found: FoundCheckpoint) -> RestorePlan:
            # A limit that the user set is no question of the moment: it ends the run either way.
            if self._role.is_alone and self._session.config.host_memory_limit is not None:
                self._pipeline.require_memory(found.state_bytes)
            return compare(found)

        return InPlace(
            compare_if_it_fits,
            set_positions=set_positions,
            require_memory=self._require_memory,
            verifies=self._session.config.verify_before_load,
        )

    def _load(self, step: int | None, loading: InPlace) -> Restored | None:
        restorer = Restorer(
            self._session.chk_dir,
            remote=self._session.remote(),
            num_threads=self._session.config.writer_threads,
            shows_progress=self._role.rank == 0,
            may_arrive_in_part=self._is_copied,
            held=self._pipeline.inheritance.held,
        )
        self._progress.is_cut_off = False
        try:
            return self._coordinator.restore(restorer, step, loading, chk=self._session.chk)
        except BaseException as error:
            self._progress.spoiled = loading.spoiled
            self._progress.is_cut_off = is_outage(error)
            if self._progress.is_cut_off:
                self._session.reporter.end(State.CUT_OFF)
            if not isinstance(error, CheckFreqError):
                raise
            if self._progress.spoiled or not self._is_no_checkpoint(error):
                raise loading.told(error) from error
            logger.warning("no checkpoint has arrived whole: training starts anew (%s)", error)
            self._persistence.start_over()
            return None

    def _is_no_checkpoint(self, error: CheckFreqError) -> bool:
        """Whether an agent that copies files may have copied no checkpoint whole until now."""
        is_of_all = isinstance(error, CorruptCheckpointError) and error.check == NONE_VALID
        return self._is_copied and is_of_all

    def _require_memory(self, new_bytes: int) -> None:
        if self._role.is_alone:  # of many, none knows what the others on its node take
            require_memory(new_bytes)

    def _start_anew(self) -> None:
        self._progress.may_start = True
        if not self._role.shares_all:  # some may hold what was never one of all ranks
            self._persistence.start_over()

    # ---- afterwards

    def _continue_from(self, found: FoundCheckpoint, *, explicit: bool) -> None:
        self._progress.global_step = found.step
        self._progress.restored_step = found.step
        self._session.reporter.begin(found.step, restored=True)
        self._progress.restored_from = found.source
        self._pipeline.continue_from(
            found.step,
            attempt=found.manifest.attempt,
            was_chosen=explicit or any(r.is_unreadable for r in found.rejected),
            is_durable=self._is_durable(found),
        )
        removed = self._discard_partial(found) if self._is_copied else ()
        for rejected in found.rejected:
            if rejected.step not in removed:
                self._report(rejected, found)
        place = self._place_of(found)
        self._session.say("restored step %d from %s", found.step, place, is_vital=True)
        lost = max((r.step for r in found.rejected), default=found.step) - found.step
        self._persistence.record(
            "restored",
            found.step,
            steps_lost=lost,
            source=found.source,
            was_chosen=explicit or None,
        )

    def _place_of(self, found: FoundCheckpoint) -> object:
        if found.is_from_memory:
            return f"memory, where the run before had left it ({self._session.chk_dir})"
        return self._session.chk_dir if found.remote is None else found.remote.name

    def _is_durable(self, found: FoundCheckpoint) -> bool:
        """Whether there is a checkpoint of it already; a worker may still be writing it."""
        if self._persistence.in_flight(found.step) is not None:
            return False
        return not found.is_from_memory or found.step in self._persistence.steps()

    def _report(self, rejected: Rejected, found: FoundCheckpoint) -> None:
        """Say that a step does not validate; what is damaged in the mirror stays where it is."""
        lost = rejected.step - found.step
        if not isinstance(rejected.error, CorruptCheckpointError):
            logger.warning(
                "step %d cannot be read and stays as it is: %s; going back to step %d loses %d "
                "step(s)",
                rejected.step,
                rejected.error,
                found.step,
                lost,
            )
            return
        if rejected.in_memory:
            # The memory of a snapshot is overwritten last, and a kill may come while it is.
            logger.log(
                logging.WARNING if lost else logging.INFO,
                "what the run before left of step %d in memory is not used: %s; restored is step "
                "%d from the %s",
                rejected.step,
                rejected.error,
                found.step,
                found.source,
            )
            return
        if rejected.in_mirror:
            logger.warning(
                "step %d of the mirror does not validate and is not used: %s; going back to step "
                "%d loses %d step(s)",
                rejected.step,
                rejected.error,
                found.step,
                lost,
            )
            return
        logger.warning(
            "step %d does not validate and is quarantined: %s; going back to step %d loses "
            "%d step(s)",
            rejected.step,
            rejected.error,
            found.step,
            lost,
        )
        if self._role.leads and rejected.is_here:
            self._persistence.quarantine(rejected.step, rejected.error)

    def _discard_partial(self, found: FoundCheckpoint) -> tuple[int, ...]:
        """Remove what an agent had copied in part; kept, it would be copied to and fro for good."""
        rejected = {
            one.step: one.error
            for one in found.rejected
            if one.is_here and isinstance(one.error, CorruptCheckpointError)
        }
        steps = self._persistence.discard_partial(rejected, older_than=found.step)
        for step in steps:
            logger.info("step %d has not arrived whole, and is removed", step)
        return steps

    def _is_finished(self, found: FoundCheckpoint) -> bool:
        if found.remote is None:
            return self._coordinator.is_finished(found.step)
        marks = self._coordinator.each("restore(): reading marks", found.remote.marks)
        return marks.get(found.step, StepMark()).finished

    def _take_up(self, found: FoundCheckpoint, *, reopen: bool) -> None:
        """Find out whether the run was finished, and say so or have it go on."""
        progress, step = self._progress, self._progress.global_step
        progress.is_finished = self._is_finished(found)
        if progress.is_finished and reopen:
            progress.is_finished = False
            self._persistence.note_finished(step, finished=False)
            self._session.say("the run was finished at step %d and is reopened", step)
        elif progress.is_finished:
            logger.warning(
                "this run is finished: finish() was called at step %d. Nothing is trained: "
                "iterators hand out nothing. To train on, restore(reopen=True); from an earlier "
                "step, restore(step=...); to start over, fresh=True",
                step,
            )
