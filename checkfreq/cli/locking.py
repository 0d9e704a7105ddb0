"""The lock of a directory, for the time of one command."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from checkfreq.errors import ConfigError
from checkfreq.persist.lock import DirectoryLock, LockTimeoutError
from checkfreq.store.store import CheckpointStore

_WAIT_S = 2.0


@contextlib.contextmanager
def locked(store: CheckpointStore, *, otherwise: str) -> Iterator[None]:
    """Hold the lock. ConfigError beside a run, which ends with ``otherwise``: what to do there."""
    lock = DirectoryLock(store.root)
    try:
        lock.acquire(
            timeout_s=_WAIT_S,
            owner_pid=os.getpid(),
            on_wait=lambda holder: None,
            give_up=_slept,
        )
    except LockTimeoutError as error:
        raise ConfigError(
            f"{store.root} is in use ({error}): expected no run there. {otherwise}"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _slept(seconds: float) -> bool:
    time.sleep(seconds)
    return False
