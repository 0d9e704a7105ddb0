"""The checkpoints known to be in the directory, and which of them retention may remove.

Read once, when the directory is opened, and kept up to date from the worker's replies: a commit
must not make the training thread list a directory and parse records, which takes long on network
storage. Belongs to the training thread.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from checkfreq.errors import CheckFreqError
from checkfreq.persist import protocol as p
from checkfreq.persist.attempts import Attempt, Marks
from checkfreq.persist.commit import SPARE_BYTES
from checkfreq.persist.listing import Record, info_of, listed
from checkfreq.policy.retention import Retention, RetentionPolicy, Worth
from checkfreq.policy.retention_info import CheckpointInfo
from checkfreq.store.marks import StepMark
from checkfreq.store.store import CheckpointStore

#: Steps count from 1: what is later than this is every checkpoint.
BEFORE_EVERY_STEP = -1

#: The next checkpoint may be on its way before the worker hears of a removal, so there should be
#: room for the one after it as well.
_ROOM_FOR = 2


class Catalog:
    """Steps with their marks, and the removals that were requested.

    ``is_shared``: all ranks commit into this directory. Otherwise other directories hold a share
    of each step, and only what is older than the last confirmed step may be removed.
    """

    def __init__(
        self, store: CheckpointStore, retention: RetentionPolicy, *, is_shared: bool
    ) -> None:
        self._store = store
        self._retention = retention
        self._known: dict[int, CheckpointInfo] | None = None
        self._confirmed_step: int | None = None if is_shared else BEFORE_EVERY_STEP
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
        self._known = listed(self._store, record_of)

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

    def add_if_left(self, attempt: Attempt) -> None:
        """A commit that failed in its last sync leaves its step, which retention must know of."""
        if self._known is None or attempt.step in self._known:
            return
        with contextlib.suppress(CheckFreqError, OSError):
            record = self._store.manifest(attempt.step)
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
        infos = self._infos()
        doomed = self._retention.to_remove(infos)
        staying = [info for info in infos if info.step not in doomed]
        return self._request([*doomed, *self._history_for_room(staying, freed=doomed)])

    def make_room(self, missing_bytes: int) -> tuple[int, ...]:
        """The steps to remove now since the disk had no room for a checkpoint; they count as
        requested. None unless the policy bounds itself by the disk."""
        if not isinstance(self._retention, Retention) or not self._retention.fits_disk():
            return ()
        requested = self._requested()
        missing_bytes -= self._bytes_of(requested)
        staying = [info for info in self._infos() if info.step not in requested]
        return self._request(self._retention.give_up(staying, missing_bytes))

    def _history_for_room(
        self, staying: Sequence[CheckpointInfo], *, freed: Collection[int]
    ) -> list[int]:
        """What must go besides, so that the disk has room for the next checkpoints."""
        policy = self._retention
        if not isinstance(policy, Retention) or not policy.fits_disk():
            return []
        if self._free_bytes is None or not staying:
            return []
        coming = self._free_bytes + self._bytes_of({*freed, *self._requested()})
        missing = _ROOM_FOR * (staying[-1].num_bytes + SPARE_BYTES) - coming
        return policy.give_up(staying, missing, at_most=Worth.HISTORY)

    def _request(self, steps: Collection[int]) -> tuple[int, ...]:
        allowed = tuple(filter(self._may_go, sorted(steps)))
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

    def _may_go(self, step: int) -> bool:
        if self._confirmed_step is not None and step >= self._confirmed_step:
            return False
        # The worker may take longer over a removal than the next commit does.
        return step not in self._requested()

    def removals_answered(self, removed: Collection[int] = ()) -> None:
        """The worker is done with the oldest request: these steps are gone."""
        self._prunes.popleft()  # it answers in the order of the requests
        for step in removed:
            self.remove(step)

    def _loaded(self) -> dict[int, CheckpointInfo]:
        assert self._known is not None, "the directory is not open"
        return self._known
