"""The coordinator of a run of many ranks: all of them do together what ``SingleRank`` does alone.

All ranks make the same calls in the same order. Between meetings each rank does its own part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from checkfreq.config import CFConfig
from checkfreq.errors import CheckFreqError, PersistError
from checkfreq.pacing.profiler import Profiler
from checkfreq.persist.attempts import Attempt, Marks
from checkfreq.persist.listing import Record
from checkfreq.ranks.comparison import compare, doubtful_text, lost_error
from checkfreq.ranks.coordinator import NO_PROPOSAL, NOTHING, Decision, Proposal, Restored
from checkfreq.ranks.joint_restore import JointRestorer
from checkfreq.ranks.meetings import Meetings
from checkfreq.ranks.merging import agreeing, all_say, first_says
from checkfreq.ranks.tally import Durable, Values, Vote
from checkfreq.ranks.voting import Voting
from checkfreq.restore.in_place import InPlace
from checkfreq.restore.restorer import Restorer
from checkfreq.run.notices import LastMoment
from checkfreq.run.pipeline import Pipeline
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.types import Json, Role

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: An event lists at most so many of the names that differ between ranks.
_MOST_NAMES = 20


class MultiRank:
    """This rank among the others."""

    def __init__(
        self,
        meetings: Meetings,
        role: Role,
        pipeline: Pipeline,
        profiler: Profiler,
        last_moment: LastMoment,
        *,
        config: CFConfig,
    ) -> None:
        self._meetings = meetings
        self._voting = Voting(meetings)
        self._role = role
        self._pipeline = pipeline
        self._persistence = pipeline.persistence
        self._profiler = profiler
        self._last_moment = last_moment
        meetings.is_hurried = lambda: last_moment.signalled() is not None
        self._config = config
        self._last_step: int | None = None
        self._is_held_back = False
        self._last_s = time.perf_counter()
        self._may_compare = config.compare_ranks
        self._noted_step: int | None = None
        self._unequal_metrics: set[str] = set()

    def each(self, phase: str, action: Callable[[], T]) -> T:
        """See Coordinator."""
        results: list[T] = []
        self._meetings.act(phase, lambda: results.append(action()), merge=agreeing())
        return results[0]

    def ask_first(self, phase: str, question: Callable[[], Json]) -> Json:
        """See Coordinator."""
        is_asked = self._role.rank == 0
        return self._meetings.act(phase, lambda: question() if is_asked else None, merge=first_says)

    def open(self, *, check: Callable[[int], Record] | None = None) -> None:
        """See Coordinator and Persistence."""
        limit_s = self._persistence.open_timeout_s
        self._meetings.until(
            "opening the directory",
            partial(self._persistence.try_open, check=check),
            left_s=lambda waited_s: limit_s - waited_s,
            what="its checkpoint directory",
        )

    def raise_failures(self) -> None:
        """See Coordinator. Failures are votes here: the next meeting raises, on all ranks."""

    # ---- boundaries

    def decide(
        self,
        step: int,
        proposal: Callable[[], Proposal],
        *,
        must_meet: bool,
        marks: Marks | None = None,
    ) -> Decision:
        """See Coordinator."""
        if not must_meet and not self._voting.meets_at(step):
            return NOTHING
        own = proposal if self._role.rank == 0 else lambda: NO_PROPOSAL  # only rank 0's counts
        start_s = time.perf_counter()
        decision = self._agree("step()", step, own, marks or Marks())
        met_s = time.perf_counter() - start_s
        self._pipeline.held.met(met_s)
        self._profiler.met(met_s)
        return decision

    def _agree(
        self, phase: str, step: int, proposal: Callable[[], Proposal], marks: Marks
    ) -> Decision:
        """Vote, and apply what every decision brings, whatever its phase."""
        decision = self._voting.agree(
            f"{phase} at step {step}",
            lambda: self._vote(step, proposal(), marks),
            state=self._pipeline.replicas,
        )
        self._last_step, self._last_s = step, time.perf_counter()
        self._is_held_back = decision.is_held_back
        self._profiler.take_over(decision.costs)
        self._confirm(decision.confirmed_step)
        self._warn_of_metrics(decision.unequal)
        self._compare_values()
        return decision

    def _warn_of_metrics(self, unequal: Mapping[str, Values]) -> None:
        """Warn once about each metric on which ranks disagree: rank 0's value is stored."""
        texts = [
            f"{name} is {', '.join(_shown(rank, value) for rank, value in values)}"
            for name, values in unequal.items()
            if name not in self._unequal_metrics
        ]
        self._unequal_metrics |= {*unequal}
        if texts and self._role.rank == 0:
            logger.warning(
                "save(metrics=...): %s: rank 0's is stored. Reduce it over the ranks first",
                "; ".join(texts),
            )

    def _vote(self, step: int, proposal: Proposal, marks: Marks) -> Vote:
        self._persistence.raise_if_intolerable()
        return Vote(
            proposal,
            is_ready=self._pipeline.has_room,
            is_written=self._pipeline.is_written(step),
            is_restructured=self._pipeline.replicas.is_restructured,
            stop=self._last_moment.signalled(),
            end=self._last_moment.end(),
            needs=self._pipeline.needs(),
            step=step,
            durable=self._durable(),
            costs=self._profiler.costs(),
            next_step=self._next_meeting(step, proposal),
            held_back=self._persistence.why_held_back(),
            keep=marks.keep,
            metrics=marks.metrics,
        )

    def _next_meeting(self, step: int, proposal: Proposal) -> int:
        """The boundary of the next meeting, as rank 0 proposes it."""
        return self._profiler.next_meeting(
            step,
            is_late=bool(proposal.why_late) or self._pipeline.is_deferred,
            is_held_back=self._is_held_back,
            iteration_s=self._recent_iteration_s(step),
            every_s=self._config.meet_every_s,
            since_last=self._since_last(step),
        )

    def _recent_iteration_s(self, step: int) -> float | None:
        """Seconds per iteration: the profiler's estimate, or the mean since the last meeting if
        that is longer, or if there is no estimate yet."""
        known_s, num_steps = self._profiler.iteration_s, self._since_last(step)
        if num_steps == 0:
            return known_s
        return max(known_s or 0.0, (time.perf_counter() - self._last_s) / num_steps)

    def _since_last(self, step: int) -> int:
        """Boundaries since the last meeting; 0 before the first of this process."""
        return 0 if self._last_step is None else step - self._last_step

    def _durable(self) -> Durable | None:
        return self._persistence.durable_attempts() if self._role.leads else None

    def _confirm(self, step: int | None) -> None:
        if step is not None:
            self._persistence.confirm(step)

    # ---- checkpoints

    def take(self, step: int, decision: Decision, marks: Marks) -> Attempt | None:
        """See Coordinator."""
        marks = Marks(decision.keep, dict(decision.metrics))  # the same in every directory
        if decision.is_written:
            return self._pipeline.mark(step, marks)
        if decision.waits_for:
            self._wait_until("waiting for slots", self._pipeline.wait_for_room, "a free slot")
        if decision.place is not None:
            self._pipeline.set_place(decision.place)
        try:
            self._note_values(step)
            return self._pipeline.checkpoint(
                step, decision.reason, marks, must=decision.must, agreed=decision.attempt
            )
        except Exception as error:  # the others take theirs, and would wait for this rank
            self._meetings.leave(f"{type(error).__name__}: {error}")
            raise

    def _note_values(self, step: int) -> None:
        """At the run's first checkpoint, start digesting what should be equal on all ranks.

        The digests are compared at the next meeting, when devices have finished computing them:
        nothing waits for a device.
        """
        if not self._may_compare:
            return
        start_s = time.perf_counter()
        self._pipeline.replicas.digest_values()
        # Comes once in a run: no part of an iteration, and no checkpoint's cost.
        self._pipeline.held.met(time.perf_counter() - start_s)
        self._may_compare = False
        self._noted_step = step

    def _compare_values(self) -> None:
        """Raise StateError on all ranks if weights would be lost; warn of other differences."""
        if self._noted_step is None:
            return
        found = compare(self._meetings, self._pipeline.replicas)
        if found is None:
            return
        step, self._noted_step = self._noted_step, None
        if found and self._role.leads:
            names = {
                "lost": [*found.lost][:_MOST_NAMES],
                "doubtful": [*found.doubtful][:_MOST_NAMES],
            }
            self._persistence.record("ranks differ", step, **names)
        if found.lost:
            raise lost_error(found, step=step)
        if found and self._role.rank == 0:
            logger.warning("%s", doubtful_text(found))

    def require(self, step: int, reason: str, marks: Marks) -> Attempt | None:
        """See Coordinator."""
        decision = self._agree(
            f"a {reason} checkpoint", step, lambda: Proposal(reason, must=True), marks
        )
        return self.take(step, decision, marks)

    def outcome(self, step: int, attempt: Attempt | None) -> CheckFreqError | None:
        """See Coordinator."""
        phase = f"waiting for step {step} to be durable"
        self._wait_until(phase, partial(self._pipeline.has_ended, attempt), "it")
        error = None if attempt is None else attempt.error
        failed = self._settle(phase, error)
        if failed and error is None:
            return PersistError(failed, step=step, phase="another rank")
        return error

    def wait(self) -> None:
        """See Coordinator."""
        self._wait_until("wait()", self._pipeline.is_idle, "checkpoints in flight")
        self._settle("wait()", None)
        self.each("wait()", self._persistence.raise_if_intolerable)

    def _wait_until(self, phase: str, is_done: Callable[[float], bool], what: str) -> None:
        with self._pipeline.waiting():
            self._meetings.until(phase, is_done, left_s=self._pipeline.patience_s, what=what)

    def _settle(self, phase: str, error: CheckFreqError | None) -> str:
        """After a wait: which ranks failed ("" if none), and note which step is durable now."""
        settled = self._voting.settle(
            phase,
            None if error is None else str(error),
            durable=self._durable(),
        )
        self._confirm(settled.confirmed_step)
        self._compare_values()
        return settled.failed

    # ---- restore and end

    def note_finished(self, step: int) -> bool:
        """See Coordinator."""
        self._persistence.note_finished(step, finished=True)
        self._wait_until("finish()", self._pipeline.is_answered, "the mark of a finished run")
        return self.is_finished(step)

    def is_finished(self, step: int) -> bool:
        """See Coordinator."""
        phase = f"whether the run is finished at step {step}"
        is_one = partial(self._persistence.is_finished, step)
        return bool(self._meetings.act(phase, is_one, merge=all_say))

    def restore(
        self, restorer: Restorer, step: int | None, loading: InPlace, *, chk: CFCheckpoint
    ) -> Restored | None:
        """See Coordinator."""
        self.open(check=restorer.summary)
        # What workers that were taken over still write becomes a checkpoint, or does not.
        self._wait_until("restore(): writing", self._pipeline.is_idle, "checkpoints in flight")
        joint = JointRestorer(restorer, self._meetings, loading, chk=chk, role=self._role)
        return joint.restore(step)

    def restored(self, step: int) -> None:
        """See Coordinator. Directories of different nodes may hold different weights."""
        if not self._config.compare_ranks:
            return

        def note() -> bool:
            try:
                self._pipeline.replicas.digest_values()
            except (
                CheckFreqError
            ):  # not complete before the first update: the first checkpoint will compare
                return False
            return True

        if self._meetings.act("restore(): reading what was loaded", note, merge=all_say):
            self._noted_step = step
            self._compare_values()

    def leave(self, why: str) -> None:
        """See Coordinator."""
        self._meetings.leave(why)

    def close(self) -> None:
        """See Coordinator."""
        self._meetings.close()


def _shown(rank: int, value: float | None) -> str:
    return f"{'nothing' if value is None else repr(value)} on rank {rank}"
