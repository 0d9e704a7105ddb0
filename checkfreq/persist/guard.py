"""Keeping a checkpoint directory while people and other programs move things under a run.

Looked at before each commit and each change. A directory that was removed is made again, one
that was replaced or whose lock file was deleted is locked again, and the trainer is told. Not
where another process holds the lock now, where steps lie that are newer than any of this run,
or where the file system itself seems to have gone: then nothing is written, and the next
commit looks again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from checkfreq.errors import StorageError
from checkfreq.persist.lock import DirectoryLock, LockState, LockTimeoutError
from checkfreq.store.store import CheckpointStore


class DirectoryGuard:
    """A directory whose lock this process took.

    ``on_retaken`` is told in words what happened, and the steps that are there.
    """

    def __init__(
        self,
        store: CheckpointStore,
        lock: DirectoryLock,
        *,
        owner_pid: int,
        shares: bool,
        on_retaken: Callable[[str, tuple[int, ...]], None],
    ) -> None:
        self._store = store
        self._lock = lock
        self._owner_pid = owner_pid
        self._shares = shares
        self._on_retaken = on_retaken
        self._known = set(store.steps())

    def note_steps(self) -> None:
        """Remember which steps are there, all of them this run's or older."""
        self._known = set(self._store.steps())

    def ensure(self) -> None:
        """Return with the directory held; StorageError where it cannot be, or should not."""
        state = self._lock.state()
        if state is LockState.HELD:
            return
        if state is LockState.GONE:
            self._make_again()
        self._require_ours(state)  # a directory of others' does not even get a lock file
        self._lock_again(state)
        try:
            self._require_ours(state)
            self._store.open(keep_pending=self._shares)
        except BaseException:
            self._lock.release()
            raise
        self._lock.accept()
        before = self._known
        self.note_steps()
        self._on_retaken(self._account(state, before), tuple(sorted(self._known)))

    def _make_again(self) -> None:
        root = self._store.root
        nearest = next(path for path in root.parents if self._store.ops.exists(path))
        if not self._lock.is_on_file_system_of(nearest):
            raise self._refusal(LockState.GONE, "and its file system with it: mount that again")
        self._store.make()

    def _lock_again(self, state: LockState) -> None:
        try:
            self._lock.acquire(
                timeout_s=0.0,
                owner_pid=self._owner_pid,
                on_wait=lambda holder: None,
                give_up=lambda seconds: True,
            )
        except LockTimeoutError as error:
            raise self._refusal(
                state, f"and it is locked by {error.holder} now: end one of the two runs"
            ) from error

    def _require_ours(self, state: LockState) -> None:
        there = set(self._store.steps())
        if not self._lock.is_on_file_system_of(self._store.root) and not self._known <= there:
            raise self._refusal(state, "on another file system: mount the one that was there")
        newest = max(self._known, default=-1)
        if newer := sorted(step for step in there if step > newest):
            raise self._refusal(
                state,
                f"and what is there now has step {newer[-1]}, newer than any of this run: put "
                "this run's directory back, or move those steps away",
            )

    def _refusal(self, state: LockState, why: str) -> StorageError:
        text = f"{state.value} while training, {why}. Nothing is written there until then"
        return StorageError(errno.ESTALE, text, str(self._store.root))

    def _account(self, state: LockState, before: set[int]) -> str:
        gone = sorted(before - self._known)
        lost = f"; earlier checkpoints are gone: step(s) {_named(gone)}" if gone else ""
        return f"{self._store.root}: {state.value} while training; it is locked again{lost}"


def _named(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
