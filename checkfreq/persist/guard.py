"""Keeps a checkpoint directory locked while people and other programs move it under a run.

Checked before every commit and every other change. A directory that was removed is created
again; one that was replaced, or whose lock file was deleted, is locked again; the trainer is
told. There are three exceptions: another process holds the lock now, the directory holds steps
that are newer than any of this run, or the file system itself is gone (unmounted). Then nothing
is written, and the next commit checks again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from checkfreq.errors import StorageError
from checkfreq.persist.lock import DirectoryLock, LockState, LockTimeoutError
from checkfreq.store.store import CheckpointStore


class DirectoryGuard:
    """Watches a directory whose lock this process took.

    ``shares``: other ranks write parts there. ``on_retaken`` is called with a message and the
    steps in the directory after it was locked again.
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

    def note(self, *, committed: int | None, gone: Callable[[int], bool]) -> None:
        """Record what this process changed: the steps that are there are this run's or older.

        Without a listing of the directory, in which there may be anything.
        """
        added = () if committed is None else (committed,)
        self._known = {step for step in self._known if not gone(step)}.union(added)

    def ensure(self) -> None:
        """Lock the directory again if need be; StorageError if that fails or is not safe."""
        state = self._lock.state()
        if state is LockState.HELD:
            return
        if state is LockState.GONE:
            self._make_again()
        self._require_ours(state)  # before locking: another run's directory gets no lock file
        self._lock_again(state)
        try:
            self._require_ours(state)  # again, now that no other run can commit meanwhile
            self._store.open(keep_pending=self._shares)
        except BaseException:
            self._lock.release()
            raise
        self._lock.remember_directory()
        before = self._known
        self._known = set(self._store.steps())
        self._on_retaken(self._retaken_text(state, before), tuple(sorted(self._known)))

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

    def _retaken_text(self, state: LockState, before: set[int]) -> str:
        gone = sorted(before - self._known)
        lost = f"; earlier checkpoints are gone: step(s) {_named(gone)}" if gone else ""
        return f"{self._store.root}: {state.value} while training; it is locked again{lost}"


def _named(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
