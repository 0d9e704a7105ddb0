"""What the manager asks of the ranks of a run, and the run of a single rank.

At a boundary the manager makes a ``Proposal`` and carries out the ``Decision``. With one rank
they are the same; many ranks vote (``ranks.multi_rank``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from checkfreq.errors import CheckFreqError
from checkfreq.persist.attempts import Attempt, Marks
from checkfreq.restore.restorer import LoadedCheckpoint, Restorer
from checkfreq.run.interrupt import StopNotice
from checkfreq.run.pipeline import Pipeline
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.types import SnapshotPlace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank would do at this boundary: a checkpoint for ``reason``, or none ("").

    ``must``: it waits for a slot; otherwise it is deferred. ``why_late``: it is due, and would
    have to wait. ``place`` is where to take the snapshot (None: where the last one was taken).
    """

    reason: str = ""
    must: bool = False
    why_late: str = ""
    place: SnapshotPlace | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do: a checkpoint for ``reason``, if any.

    ``defer`` says why a periodic one has to wait. ``stop`` names the signal that came. Of many
    ranks: ``attempt`` is the checkpoint's id ("": there is none to take), ``waits_for`` the ranks
    without a slot, ``is_written`` that the step is on its way on all, ``confirmed_step`` is
    committed in every directory, ``costs`` are the highest, ``next_step`` is when to meet again,
    ``compares`` that the structure of the state changed somewhere, and ``is_held_back`` that
    storage fails on some, which pauses periodic ones. ``keep`` and ``metrics`` are rank 0's marks
    for the checkpoint; ``unequal`` are the metrics that others have otherwise, with the values of
    all ranks.
    """

    reason: str = ""
    must: bool = False
    place: SnapshotPlace | None = None
    defer: str = ""
    stop: str | None = None
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
    unequal: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


#: What most boundaries come to: shared, since they come often.
NO_PROPOSAL = Proposal()
NOTHING = Decision()


class Coordinator(Protocol):
    """What differs between a run of one rank and one of many."""

    def each(self, phase: str, action: Callable[[], T]) -> T:
        """Do something on every rank; if it fails on one, raise on all."""
        ...

    def open(self) -> None:
        """Return once the directory is this run's."""
        ...

    def raise_failures(self) -> None:
        """Raise if more checkpoints in a row have failed than are tolerated; before a boundary."""
        ...

    def decide(
        self,
        step: int,
        proposal: Callable[[], Proposal],
        *,
        must_meet: bool,
        marks: Marks | None = None,
    ) -> Decision:
        """What to do at a boundary. ``must_meet``: it is one at which all ranks know to meet.
        ``marks``: of the checkpoint that was asked for."""
        ...

    def take(self, step: int, decision: Decision, marks: Marks) -> Attempt | None:
        """Take the checkpoint that was decided; None if it is durable already."""
        ...

    def require(self, step: int, reason: str, marks: Marks) -> Attempt | None:
        """Take a checkpoint that has to be taken, waiting for a slot; None if it is durable."""
        ...

    def outcome(self, step: int, attempt: Attempt | None) -> CheckFreqError | None:
        """Wait for an attempt's end; why it is no checkpoint, if it is none."""
        ...

    def wait(self) -> None:
        """Return once nothing is in flight; raise what was not tolerated."""
        ...

    def note_finished(self, step: int) -> bool:
        """Have it noted that the run is over with ``step``; whether that is durable everywhere."""
        ...

    def is_finished(self, step: int) -> bool:
        """Whether every directory of the run says so."""
        ...

    def find(
        self, restorer: Restorer, step: int | None, *, chk: CFCheckpoint
    ) -> LoadedCheckpoint | None:
        """Open the directory; read ``step``, or the newest that is valid; None on a first run."""
        ...

    def restored(self, step: int) -> None:
        """All of a checkpoint was loaded; raise where ranks have other weights than the rest."""
        ...

    def leave(self, why: str) -> None:
        """An exception ends the training here."""
        ...

    def close(self) -> None:
        """After everything else; idempotent."""
        ...


class SingleRank:
    """A run of one rank."""

    def __init__(self, pipeline: Pipeline, notice: StopNotice) -> None:
        self._pipeline = pipeline
        self._persistence = pipeline.persistence
        self._notice = notice

    def each(self, phase: str, action: Callable[[], T]) -> T:
        """See Coordinator."""
        return action()

    def open(self) -> None:
        """See Coordinator."""
        self._persistence.open()

    def raise_failures(self) -> None:
        """See Coordinator."""
        self._persistence.book.raise_if_intolerable()

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
        if own.reason and not own.must and (why := self._persistence.alarm.why_held_back()):
            own = Proposal(why_late=why)
        if own is NO_PROPOSAL and self._notice.received is None:
            return NOTHING
        return Decision(own.reason, own.must, own.place, own.why_late, self._notice.received)

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
        self._persistence.book.raise_if_intolerable()

    def note_finished(self, step: int) -> bool:
        """See Coordinator."""
        self._persistence.note_finished(step, finished=True)
        self._pipeline.wait_answered()
        return self._persistence.is_finished(step)

    def is_finished(self, step: int) -> bool:
        """See Coordinator."""
        return self._persistence.is_finished(step)

    def find(
        self, restorer: Restorer, step: int | None, *, chk: CFCheckpoint
    ) -> LoadedCheckpoint | None:
        """See Coordinator."""
        open_directory = partial(self._persistence.open, check=restorer.attempt)
        return restorer.find_while_opening(step, open_directory=open_directory)

    def restored(self, step: int) -> None:
        """See Coordinator."""

    def leave(self, why: str) -> None:
        """See Coordinator."""

    def close(self) -> None:
        """See Coordinator."""
