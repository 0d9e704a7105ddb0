"""The temporary directory of one save: the coordinator commits it, the other ranks join it.

The coordinator makes the directory before DCP lets any rank write. So a rank that can still create
it sees a different disk.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from pathlib import Path

from checkfreq.errors import ConfigError, CorruptCheckpointError
from checkfreq.persist.lock import DirectoryLock, LockTimeoutError
from checkfreq.store.manifest import Manifest
from checkfreq.store.store import CheckpointStore, Pending

#: The same for every save: a planner that caches its plans would not tell the ranks a new one.
ATTEMPT = "dcp"


class Commit:
    """The coordinator's side of one save."""

    def __init__(self, root: Path, step: int, *, overwrite: bool, attempt: str = ATTEMPT) -> None:
        self._root = root
        self._step = step
        self._attempt = attempt
        self._overwrite = overwrite
        self._store = CheckpointStore(root)
        self._lock = DirectoryLock(root)
        self._pending: Pending | None = None
        weakref.finalize(self, self._lock.release)

    @property
    def pending(self) -> Pending:
        """The checkpoint that is being written."""
        assert self._pending is not None
        return self._pending

    def begin(self, *, num_bytes: int, lock_timeout_s: float) -> None:
        """Take the lock, remove leftovers, and make the temporary directory.

        Raises ConfigError if the directory is in use or has the step already, and OSError.
        """
        self._store.make()
        self._acquire(lock_timeout_s)
        try:
            self._require_free_step()
            self._store.open()
            self._pending = self._store.begin(
                self._step, attempt=self._attempt, num_bytes=num_bytes
            )
        except BaseException:
            self.give_up()
            raise

    def _acquire(self, timeout_s: float) -> None:
        try:
            self._lock.acquire(
                timeout_s=timeout_s,
                owner_pid=os.getpid(),
                on_wait=_collect_writers,
                give_up=threading.Event().wait,
            )
        except LockTimeoutError as error:
            raise ConfigError(
                f"{self._root} is being written to: {error}. End that run, or save into another "
                "directory"
            ) from error

    def _require_free_step(self) -> None:
        if self._overwrite or self._step not in self._store.steps():
            return
        with contextlib.suppress(CorruptCheckpointError):  # the commit sets a damaged one aside
            self._store.inspect(self._step)
            raise ConfigError(
                f"{self._store.path(self._step)} is there already; save another step, or pass "
                "overwrite=True, which moves it and all later ones to superseded/"
            )

    def finish(self, manifest: Manifest) -> None:
        """Commit. Raises OSError, PersistError, ConfigError (a rank wrote elsewhere)."""
        for entry in manifest.files:
            if not self._store.ops.exists(self.pending.path / entry.name):
                raise ConfigError(
                    f"{entry.name} is not in {self.pending.path}, although its rank wrote it: the "
                    "directory must be the same one on all ranks"
                )
        after = self._step - 1 if self._overwrite else None
        self._store.commit(self.pending, manifest, supersede_after=after)
        self._pending = None

    def give_up(self) -> None:
        """Remove what is unfinished and release the lock; idempotent."""
        if self._pending is not None:
            with contextlib.suppress(OSError):  # the next save, or run, removes it
                self._store.abort(self._pending)
            self._pending = None
        self._lock.release()


def join(root: Path, step: int) -> Pending:
    """The coordinator's temporary directory, for another rank to write its part into."""
    store = CheckpointStore(root)
    path = store.root / f".tmp-{step}-{ATTEMPT}"
    try:
        store.ops.mkdir(path)
    except FileExistsError:
        return Pending(step, ATTEMPT, path, store.ops)
    except FileNotFoundError:
        pass
    else:
        store.ops.remove_tree(path)
    raise ConfigError(
        f"{path}, which rank 0 has made, is not there on this rank: the directory and step= must "
        "be the same on all ranks"
    )


def _collect_writers(holder: str) -> None:
    """Free a writer of this process that still holds the lock after another rank failed its save.

    The error that ended that save and its traceback form a reference cycle, which keeps the writer
    alive until garbage is collected; waiting alone would never free it.
    """
    gc.collect()
