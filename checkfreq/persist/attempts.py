"""The attempts of one run: which snapshots are in flight, became durable, or failed.

There is one ``Attempt`` per snapshot, from the boundary that took it to its end state. The
worker's replies end attempts and free their slots. Failures are counted, and raised when more
fail in a row than the user tolerates (never, if that is None). Belongs to the training thread,
except ``copied`` and ``spoil``.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from checkfreq import faults
from checkfreq.errors import CheckFreqError, PersistError, SnapshotError
from checkfreq.persist import protocol as p
from checkfreq.policy.lifecycle import AttemptState, moved
from checkfreq.snapshot.arena import Slot

_NUM_REMEMBERED = 16
_INHERITED = "of the run before"


@dataclass(slots=True)
class Marks:
    """What the user wants recorded with a checkpoint: a pin, and metrics."""

    keep: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.keep or bool(self.metrics)

    def merge(self, other: Marks) -> None:
        """Add the marks of another request for the same step."""
        self.keep = self.keep or other.keep
        self.metrics.update(other.metrics)


@dataclass(slots=True)
class Attempt:
    """One snapshot on its way to a checkpoint. Times are ``time.perf_counter`` seconds.

    ``ended_s``: when this process learned of the end. ``durable_s``: when the worker had
    committed; it, ``persist_s`` and ``num_bytes`` are None without a commit. ``copy_s`` and
    ``device_copy_s``: how long the copies to the host and within the device took, on the device's
    clock. ``stall_s``: how long training waited for this snapshot. ``at_epoch_end``: an epoch
    ended with the step. ``missing_bytes``: the room that the disk lacked, if that is why it failed.
    ``is_disowned``: a killed run took it after the step at which this run goes on.
    """

    step: int
    slot: Slot
    reason: str
    marks: Marks
    started_s: float
    at_epoch_end: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    state: AttemptState = AttemptState.COPYING
    stall_s: float = 0.0
    copied_s: float | None = None
    handed_s: float | None = None
    ended_s: float | None = None
    copy_s: float | None = None
    device_copy_s: float | None = None
    persist_s: float | None = None
    num_bytes: int | None = None
    durable_s: float | None = None
    late_marks: Marks | None = None
    error: CheckFreqError | None = None
    missing_bytes: int = 0
    is_disowned: bool = False

    @classmethod
    def inherited(cls, request: p.Persist, slot: Slot) -> Attempt:
        """One of a killed run, whose worker still has it in its hands."""
        now_s = time.perf_counter()
        return cls(
            request.step,
            slot,
            _INHERITED,
            Marks(request.keep, dict(request.metrics)),
            now_s,
            at_epoch_end=request.at_epoch_end,
            id=request.attempt,
            state=AttemptState.PERSISTING,
            copied_s=now_s,
            handed_s=now_s,
        )

    @property
    def is_inherited(self) -> bool:
        """Whether a killed run took the snapshot: nothing that it cost was measured here."""
        return self.reason == _INHERITED

    def spoil(self, error: BaseException) -> None:
        """The snapshot cannot become a checkpoint (any thread); ``take_void`` ends the attempt."""
        self.error = SnapshotError(f"the snapshot of step {self.step} failed: {error!r}")
        self.error.__cause__ = error

    def copied(self, error: BaseException | None) -> bool:
        """The copy ended (any thread); returns whether the snapshot may be handed over."""
        self.copied_s = time.perf_counter()
        if error is not None:
            self.spoil(error)
            return False
        self.handed_s = self.copied_s
        self.state = moved(self.state, AttemptState.PERSISTING)
        return True

    def mark(self, marks: Marks) -> None:
        """Add marks requested after the attempt began; they are stored after the commit."""
        if self.late_marks is None:
            self.late_marks = Marks()
        self.late_marks.merge(marks)


class AttemptBook:
    """The attempts in flight, and the results of those that ended.

    ``replaces``: if a step is taken again, because it failed in another directory, the new
    checkpoint replaces the one in this directory.
    """

    def __init__(
        self,
        *,
        tolerate_failures: int | None,
        release: Callable[[Slot], None],
        replaces: bool = False,
    ) -> None:
        self._tolerate_failures = tolerate_failures
        self._replaces = replaces
        self._release = release
        self._active: dict[str, Attempt] = {}
        self._failures_in_row = 0
        self._last_error: CheckFreqError | None = None
        self.num_committed = 0
        self.num_failed = 0
        self.last_durable_step: int | None = None
        #: The newest step of which at least this rank's part is durable.
        self.last_written_step: int | None = None
        #: The newest durable checkpoints, step and attempt: ranks compare them to find a step
        #: that every directory has.
        self.durable: deque[tuple[int, str]] = deque(maxlen=_NUM_REMEMBERED)
        self._durable_before: int | None = None

    @property
    def active(self) -> tuple[Attempt, ...]:
        """Attempts that have not ended, oldest first."""
        return tuple(self._active.values())

    @property
    def num_active(self) -> int:
        """How many attempts have not ended."""
        return len(self._active)

    def find(self, step: int) -> Attempt | None:
        """The run's attempt in flight for ``step``, the newer of two; None without one."""
        own = (a for a in reversed(self._active.values()) if not a.is_disowned)
        return next((a for a in own if a.step == step), None)

    def add(self, attempt: Attempt) -> None:
        """A snapshot was begun; the attempt is in flight from now on."""
        self._active[attempt.id] = attempt
        if self._replaces and attempt.step == self.last_durable_step:
            # Until it is replaced the step does not count as durable: retention would remove
            # older ones that the run may have to go back to.
            self.last_durable_step, self.last_written_step = self._durable_before, None

    def disown_later_than(self, step: int) -> None:
        """The run goes on at ``step``: what a killed run took later is none of its checkpoints."""
        for attempt in self._active.values():
            attempt.is_disowned = attempt.is_inherited and attempt.step > step
        if self.last_written_step is not None and self.last_written_step > step:
            self.last_written_step = None
        own = [durable for durable in self.durable if durable[0] <= step]
        self.durable = deque(own, maxlen=_NUM_REMEMBERED)

    def continue_from(self, step: int, attempt: str) -> None:
        """``step`` was restored, as ``attempt`` wrote it: it is durable."""
        self.last_durable_step = step
        self.durable.append((step, attempt))

    def continue_above(self, step: int | None) -> None:
        """A step was restored that is not durable yet: ``step`` is the newest that is."""
        self.last_durable_step = step

    def confirm(self, step: int) -> bool:
        """All ranks know that ``step`` is durable; True if that is news."""
        is_news = step != self.last_durable_step
        self.last_durable_step = step
        return is_news

    def is_written(self, step: int) -> bool:
        """Whether ``step``, or this rank's part of it, is durable or in flight."""
        ended = (self.last_durable_step, self.last_written_step)
        return step in ended or self.find(step) is not None

    def take_void(self) -> list[Attempt]:
        """End and return the attempts whose copy, or whose hand-over, failed."""
        void = [a for a in self._active.values() if a.error is not None]
        for attempt in void:
            copying = attempt.state is AttemptState.COPYING
            self._end(attempt, AttemptState.VOID if copying else AttemptState.FAILED)
            self._count_failure(attempt)
        return void

    def commit(self, reply: p.Committed) -> Attempt:
        """The worker reported a durable checkpoint, or a durable part of one."""
        attempt = self._active[reply.attempt]
        attempt.persist_s = reply.persist_s
        attempt.num_bytes = reply.num_bytes
        attempt.durable_s = reply.ended_s
        self._end(attempt, AttemptState.COMMITTED)
        self.num_committed += 1
        if attempt.is_disowned:
            return attempt
        self._failures_in_row = 0
        self.last_written_step = attempt.step
        if not reply.is_part:
            if self.last_durable_step != attempt.step:
                self._durable_before = self.last_durable_step
            self.last_durable_step = attempt.step
            self.durable.append((attempt.step, attempt.id))
        return attempt

    def fail(self, reply: p.Failed) -> Attempt:
        """The worker reported a failed persist."""
        attempt = self._active[reply.attempt]
        attempt.error = PersistError(
            f"step {reply.step} was not checkpointed: {reply.message} (during {reply.phase})",
            step=reply.step,
            phase=reply.phase,
            child_traceback=reply.child_traceback,
        )
        attempt.missing_bytes = reply.missing_bytes
        self._end(attempt, AttemptState.FAILED)
        self._count_failure(attempt)
        return attempt

    def abandon(self, attempt: Attempt, error: CheckFreqError) -> Attempt:
        """A second worker died with this attempt: it has failed."""
        attempt.error = error
        self._end(attempt, AttemptState.FAILED)
        self._count_failure(attempt)
        return attempt

    def raise_if_intolerable(self) -> None:
        """Raise the latest failure if more failed in a row than tolerated; the count restarts."""
        if self._tolerate_failures is None or self._last_error is None:
            return
        if self._failures_in_row > self._tolerate_failures:
            error, self._last_error, self._failures_in_row = self._last_error, None, 0
            raise error

    def raise_if_last_failed(self) -> None:
        """Raise the failure of the newest attempt that ended, however many are tolerated."""
        if self._failures_in_row and self._last_error is not None:
            raise self._last_error

    def _end(self, attempt: Attempt, state: AttemptState) -> None:
        attempt.state = moved(attempt.state, state)
        attempt.ended_s = time.perf_counter()
        del self._active[attempt.id]
        faults.reach("slot.release")
        self._release(attempt.slot)  # only now: the worker read the slot until it replied

    def _count_failure(self, attempt: Attempt) -> None:
        self.num_failed += 1
        if attempt.is_inherited:  # nothing of this run has failed
            return
        self._failures_in_row += 1
        self._last_error = attempt.error
