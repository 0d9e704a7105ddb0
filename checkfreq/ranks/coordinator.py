"""What the manager asks of the ranks of a run, and the run of a single rank.

At a boundary the manager makes a ``Proposal`` and carries out the ``Decision``. With one rank
they are the same; many ranks vote (``ranks.multi_rank``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

from checkfreq.errors import CheckFreqError
from checkfreq.persist.attempts import Attempt, Marks
from checkfreq.restore.apply import RestorePlan
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.in_place import InPlace
from checkfreq.restore.restorer import Restorer
from checkfreq.run.notices import LastMoment, Stop
from checkfreq.run.pipeline import Pipeline
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.types import Json, SnapshotPlace

T = TypeVar("T")

#: What was restored, and what was planned for it.
Restored: TypeAlias = tuple[FoundCheckpoint, RestorePlan]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank would do at this boundary: take a checkpoint for ``reason``, or none ("").

    ``must``: wait for a slot rather than defer. ``why_late``: why a checkpoint that is due cannot
    be taken now. ``place``: where to take the snapshot (None: where the last one was taken).
    """

    reason: str = ""
    must: bool = False
    why_late: str = ""
    place: SnapshotPlace | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do at a boundary: take a checkpoint for ``reason``, if it is not empty.

    ``defer`` says why a periodic checkpoint has to wait; ``stop``: why the run stops here.

    With many ranks also: ``attempt``, the id of the checkpoint ("": none is taken); ``waits_for``,
    the ranks without a free slot; ``is_written``, whether every rank has this step written or on
    its way; ``confirmed_step``, committed in every directory; ``costs``, the highest of any rank;
    ``next_step``, the boundary of the next meeting; ``compares``, whether the structure of the
    state changed on some rank; ``is_held_back``, whether storage fails on some rank, which pauses
    periodic checkpoints. ``keep`` and ``metrics`` are rank 0's marks for the checkpoint;
    ``unequal`` holds the metrics on which ranks disagree: their values, each with the first rank
    that gave it, rank 0 in front.
    """

    reason: str = ""
    must: bool = False
    place: SnapshotPlace | None = None
    defer: str = ""
    stop: Stop | None = None
    attempt: str = ""
    waits_for: tuple[int, ...] = ()
    is_written: bool = False
    confirmed_step: int | None = None
    costs: Mapping[str, float] = field(default_factory=dict)
    next_step: int = 0
    compares: bool = False
    is_held_back: bool = False
    keep: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    unequal: Mapping[str, Sequence[tuple[int, float | None]]] = field(default_factory=dict)


#: Most boundaries propose and decide nothing: shared, so that they allocate nothing.
NO_PROPOSAL = Proposal()
NOTHING = Decision()


class Coordinator(Protocol):
    """What differs between a run of one rank and one of many."""

    def each(self, phase: str, action: Callable[[], T]) -> T:
        """Do something on every rank; if it fails on one, raise on all."""
        ...

    def ask_first(self, phase: str, question: Callable[[], Json]) -> Json:
        """What ``question()`` returns on rank 0, on every rank."""
        ...

    def open(self) -> None:
        """Return once the directory is this run's."""
        ...

    def raise_failures(self) -> None:
        """Before a boundary: raise if more checkpoints in a row failed than the user tolerates."""
        ...

    def decide(
        self,
        step: int,
        proposal: Callable[[], Proposal],
        *,
        must_meet: bool,
        marks: Marks | None = None,
    ) -> Decision:
        """What to do at the boundary ``step``.

        ``must_meet``: every rank knows that all meet at this boundary. ``marks`` belong to a
        checkpoint that the user requested.
        """
        ...

    def take(self, step: int, decision: Decision, marks: Marks) -> Attempt | None:
        """Take the checkpoint decided on; None if this step is durable already."""
        ...

    def require(self, step: int, reason: str, marks: Marks) -> Attempt | None:
        """Take a checkpoint now, waiting for a slot if need be; None if this step is durable."""
        ...

    def outcome(self, step: int, attempt: Attempt | None) -> CheckFreqError | None:
        """Wait until an attempt has ended; returns its error, None if it is durable."""
        ...

    def wait(self) -> None:
        """Return once nothing is in flight; raise failures that the user does not tolerate."""
        ...

    def note_finished(self, step: int) -> bool:
        """Mark the run as finished at ``step``; returns whether the mark is durable everywhere."""
        ...

    def is_finished(self, step: int) -> bool:
        """Whether every directory of the run marks it as finished at ``step``."""
        ...

    def restore(
        self, restorer: Restorer, step: int | None, loading: InPlace, *, chk: CFCheckpoint
    ) -> Restored | None:
        """Open the directory; load ``step`` or the newest valid one; None on a first run."""
        ...

    def restored(self, step: int) -> None:
        """A whole checkpoint was loaded: raise if the weights of the ranks differ now."""
        ...

    def leave(self, why: str) -> None:
        """Tell the other ranks that an exception ends the training on this one."""
        ...

    def close(self) -> None:
        """End the coordination, after everything else; idempotent."""
        ...


class SingleRank:
    """A run of one rank."""

    def __init__(self, pipeline: Pipeline, last_moment: LastMoment) -> None:
        self._pipeline = pipeline
        self._persistence = pipeline.persistence
        self._last_moment = last_moment

    def each(self, phase: str, action: Callable[[], T]) -> T:
        """See Coordinator."""
        return action()

    def ask_first(self, phase: str, question: Callable[[], Json]) -> Json:
        """See Coordinator."""
        return question()

    def open(self) -> None:
        """See Coordinator."""
        self._persistence.open()

    def raise_failures(self) -> None:
        """See Coordinator."""
        self._persistence.raise_if_intolerable()

    def decide(
        self,
        step: int,
        proposal: Callable[[], Proposal],
        *,
        must_meet: bool,
        marks: Marks | None = None,
    ) -> Decision:
        """See Coordinator."""
        own = proposal()
        if own.reason and not own.must and (why := self._persistence.why_held_back()):
            own = Proposal(why_late=why)
        stop = self._last_moment.due(self._pipeline.needs)
        if own is NO_PROPOSAL and stop is None:
            return NOTHING
        return Decision(own.reason, own.must, own.place, own.why_late, stop)

    def take(self, step: int, decision: Decision, marks: Marks) -> Attempt | None:
        """See Coordinator."""
        if decision.place is not None:
            self._pipeline.set_place(decision.place)
        return self._pipeline.checkpoint(step, decision.reason, marks, must=decision.must)

    def require(self, step: int, reason: str, marks: Marks) -> Attempt | None:
        """See Coordinator."""
        return self._pipeline.checkpoint(step, reason, marks, must=True)

    def outcome(self, step: int, attempt: Attempt | None) -> CheckFreqError | None:
        """See Coordinator."""
        return self._pipeline.outcome(attempt)

    def wait(self) -> None:
        """See Coordinator."""
        self._pipeline.wait_for_all()
        self._persistence.raise_if_intolerable()

    def note_finished(self, step: int) -> bool:
        """See Coordinator."""
        self._persistence.note_finished(step, finished=True)
        self._pipeline.wait_answered()
        return self._persistence.is_finished(step)

    def is_finished(self, step: int) -> bool:
        """See Coordinator."""
        return self._persistence.is_finished(step)

    def restore(
        self, restorer: Restorer, step: int | None, loading: InPlace, *, chk: CFCheckpoint
    ) -> Restored | None:
        """See Coordinator."""

        def open_directory(found: int) -> None:
            self._persistence.open(check=restorer.summary)
            if step is None or found < 0:
                self._pipeline.wait_inherited(newer_than=found)

        return restorer.find_while_opening(
            step,
            look=loading.look,
            change=loading.change,
            open_directory=open_directory,
            opens_first=self._persistence.follows_another,
        )

    def restored(self, step: int) -> None:
        """See Coordinator."""

    def leave(self, why: str) -> None:
        """See Coordinator."""

    def close(self) -> None:
        """See Coordinator."""
