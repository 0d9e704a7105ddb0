"""The checkpoints known to be in the directory, and which of them retention may remove.

Read once, when the directory is opened, and kept up to date from the worker's replies: a commit
must not make the training thread list a directory and parse records, which takes long on network
storage. Belongs to the training thread.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from checkfreq.errors import CheckFreqError, CorruptCheckpointError
from checkfreq.persist import protocol as p
from checkfreq.persist.attempts import Attempt, Marks
from checkfreq.persist.commit import SPARE_BYTES
from checkfreq.persist.listing import Record, info_of, listed
from checkfreq.policy.copying import held_back
from checkfreq.policy.retention import Retention, RetentionPolicy, Worth
from checkfreq.policy.retention_info import CheckpointInfo
from checkfreq.store.marks import StepMark
from checkfreq.store.store import CheckpointStore

#: Steps count from 1: what is later than this is every checkpoint.
BEFORE_EVERY_STEP = -1
#: What a file that is missing or too short fails. A record has its digest in its first line.
_CHECKS_OF_A_PART = frozenset({"file", "size in bytes", "first line", "own digest"})

#: The next checkpoint may be on its way before the worker hears of a removal, so there should be
#: room for the one after it as well.
_ROOM_FOR = 2


class Catalog:
    """Steps with their marks, and the removals that were requested.

    ``is_shared``: all ranks commit into this directory. Otherwise other directories hold a share
    of each step, and only what is older than the last confirmed step may be removed.
    """

    def __init__(
        self,
        store: CheckpointStore,
        retention: RetentionPolicy,
        *,
        is_shared: bool,
        agent_copies_within_s: float | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._retention = retention
        #: The policy, if it keeps less where the disk has no room; None if it does not.
        self._yielding = _if_it_yields(retention)
        self._known: dict[int, CheckpointInfo] | None = None
        self._confirmed_step: int | None = None if is_shared else BEFORE_EVERY_STEP
        self._agent_copies_within_s = agent_copies_within_s
        self._clock_s = clock_s
        #: When each step was committed, or found.
        self._since_s: dict[int, float] = {}
        self._found: frozenset[int] = frozenset()
        #: What is wrong with steps that retention leaves alone.
        self._damaged: dict[int, CorruptCheckpointError] = {}
        #: Removals that the worker has not answered yet, oldest first.
        self._prunes: deque[tuple[int, ...]] = deque()
        #: Free bytes on the disk after the newest commit; None if that is not known.
        self._free_bytes: int | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether ``load`` was called."""
        return self._known is not None

    def load(self, record_of: Callable[[int], Record]) -> None:
        """List the directory; retention leaves a step alone for which ``record_of`` raises."""
        self._known = listed(
            self._store, partial(self._record_of, record_of), on_damage=self._note_damage
        )
        self._found = frozenset(self._known)

    def _record_of(self, record_of: Callable[[int], Record], step: int) -> Record:
        record = record_of(step)
        if self._agent_copies_within_s is not None:
            self._store.inspect(step)
        return record

    def _note_damage(self, step: int, error: CorruptCheckpointError) -> None:
        self._damaged[step] = error.with_traceback(None)

    # ---- what is there

    def add(self, attempt: Attempt, reply: p.Committed) -> None:
        """The attempt's step is committed."""
        self._loaded()[attempt.step] = CheckpointInfo(
            attempt.step,
            keep=attempt.marks.keep,
            metrics=attempt.marks.metrics,
            created_s=reply.created_unix_s,
            num_bytes=reply.total_bytes,
            at_epoch_end=attempt.at_epoch_end,
        )
        self._free_bytes = reply.free_bytes
        self._since_s[attempt.step] = self._clock_s()
        self._found -= {attempt.step}

    def holds(self, step: int) -> bool:
        """Whether the step is known to be in the directory."""
        return self._known is not None and step in self._known

    def add_if_left(self, attempt: Attempt) -> None:
        """A commit that failed in its last sync leaves its step, which retention must know of."""
        if self._known is None or attempt.step in self._known:
            return
        with contextlib.suppress(CheckFreqError, OSError):
            record = self._store.head(attempt.step)
            if record.attempt == attempt.id:
                mark = StepMark(attempt.marks.keep, attempt.marks.metrics)
                self._known[attempt.step] = info_of(attempt.step, record, mark)

    def add_marks(self, step: int, marks: Marks) -> None:
        """A step was pinned or given metrics."""
        known = self._loaded()
        old = known.get(step, CheckpointInfo(step))
        known[step] = replace(
            old, keep=old.keep or marks.keep, metrics={**old.metrics, **marks.metrics}
        )

    def remove(self, step: int) -> None:
        """A step was set aside."""
        if self._known is not None:
            self._known.pop(step, None)

    def remove_later_than(self, step: int) -> None:
        """Every later step was set aside."""
        self._known = {n: info for n, info in self._loaded().items() if n <= step}

    def remove_missing(self, there: Collection[int]) -> list[int]:
        """Forget and return the steps that are not ``there``: someone else removed them."""
        gone = sorted((self._known or {}).keys() - set(there))
        for step in gone:
            self.remove(step)
        return gone

    @property
    def newest(self) -> CheckpointInfo | None:
        """The newest checkpoint; None if there is none."""
        return max((self._known or {}).values(), key=lambda info: info.step, default=None)

    # ---- what may be removed

    def confirm(self, step: int) -> bool:
        """Every directory holds its share of ``step``; True if that allows more removals.

        The step is an earlier one than before once the run has gone back to a checkpoint.
        """
        is_news = self._confirmed_step is None or step > self._confirmed_step
        self._confirmed_step = step
        return is_news and self.is_loaded

    def request_removals(self) -> tuple[int, ...]:
        """The steps to remove now; they count as requested until ``removals_answered``."""
        infos, held = self._infos(), self._held_back()
        doomed = [step for step in self._retention.to_remove(infos) if step not in held]
        staying = [info for info in infos if info.step not in doomed]
        history = self._history_for_room(staying, freed=doomed)
        return self._request([*doomed, *(step for step in history if step not in held)])

    def make_room(self, missing_bytes: int) -> tuple[int, ...]:
        """The steps to remove now since the disk had no room for a checkpoint; they count as
        requested. None unless the policy bounds itself by the disk."""
        if self._yielding is None:
            return ()
        requested = self._requested()
        missing_bytes -= self._bytes_of(requested)
        staying = [info for info in self._infos() if info.step not in requested]
        return self._request(self._yielding.give_up(staying, missing_bytes))

    def _history_for_room(
        self, staying: Sequence[CheckpointInfo], *, freed: Collection[int]
    ) -> list[int]:
        """What must go besides, so that the disk has room for the next checkpoints."""
        if self._yielding is None or self._free_bytes is None or not staying:
            return []
        coming = self._free_bytes + self._bytes_of({*freed, *self._requested()})
        missing = _ROOM_FOR * (staying[-1].num_bytes + SPARE_BYTES) - coming
        return self._yielding.give_up(staying, missing, at_most=Worth.HISTORY)

    def _request(self, steps: Collection[int]) -> tuple[int, ...]:
        # The worker may take longer over a removal than the next commit does.
        news = set(steps) - self._requested()
        allowed = tuple(step for step in sorted(news) if self._is_confirmed_past(step))
        if allowed:
            self._prunes.append(allowed)
        return allowed

    def _infos(self) -> list[CheckpointInfo]:
        return sorted(self._loaded().values(), key=lambda info: info.step)

    def _requested(self) -> set[int]:
        return {step for steps in self._prunes for step in steps}

    def _bytes_of(self, steps: Collection[int]) -> int:
        known = self._loaded()
        return sum(known[step].num_bytes for step in steps if step in known)

    def request_partial(
        self, rejected: Mapping[int, CorruptCheckpointError], *, older_than: int
    ) -> tuple[int, ...]:
        """Those of ``rejected``, and of all ``older_than``, of which something is missing.

        They count as requested, as in ``request_removals``.
        """
        older = {n: error for n, error in self._damaged.items() if n < older_than}
        partial = {n for n, error in {**older, **rejected}.items() if is_partial(error)}
        for step in partial:
            self._damaged.pop(step, None)
            self.remove(step)
        if partial:
            self._prunes.append(tuple(sorted(partial)))
        return tuple(sorted(partial))

    def _held_back(self) -> set[int]:
        """The steps that an agent that copies files may need."""
        if self._agent_copies_within_s is None:
            return set()
        now_s = self._clock_s()
        staying = self._loaded().keys() - self._requested()
        self._since_s = {step: self._since_s.get(step, now_s) for step in staying}
        ages_s = {step: now_s - since_s for step, since_s in self._since_s.items()}
        return held_back(ages_s, found=self._found, within_s=self._agent_copies_within_s)

    def _is_confirmed_past(self, step: int) -> bool:
        """Whether every directory of the run holds a later step, where there are several."""
        return self._confirmed_step is None or step < self._confirmed_step

    def removals_answered(self, removed: Collection[int] = ()) -> None:
        """The worker is done with the oldest request: these steps are gone."""
        self._prunes.popleft()  # it answers in the order of the requests
        for step in removed:
            self.remove(step)

    def _loaded(self) -> dict[int, CheckpointInfo]:
        assert self._known is not None, "the directory is not open"
        return self._known


def _if_it_yields(policy: RetentionPolicy) -> Retention | None:
    return policy if isinstance(policy, Retention) and policy.fits_disk() else None


def is_partial(error: CorruptCheckpointError) -> bool:
    """Whether a file, or the end of one, may be missing; otherwise tensors differ."""
    return error.check in _CHECKS_OF_A_PART
