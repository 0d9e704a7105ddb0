"""The lock of a directory, or the claim of a mirror, for the time of one command."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from checkfreq.errors import ConfigError
from checkfreq.persist.lock import DirectoryLock, LockTimeoutError
from checkfreq.store.source import CheckpointSource
from checkfreq.store.store import CheckpointStore

if TYPE_CHECKING:
    from checkfreq.mirror.editing import MirrorEditor

_WAIT_S = 2.0


@contextlib.contextmanager
def locked(source: CheckpointSource, *, otherwise: str) -> Iterator[CheckpointStore | MirrorEditor]:
    """What can be changed, which no run does meanwhile.

    ConfigError beside a run, which ends with ``otherwise``: what to do there.
    """
    if isinstance(source, CheckpointStore):
        with _locked(source, otherwise):
            yield source
        return
    from checkfreq.mirror.editing import MirrorEditor
    from checkfreq.mirror.reader import MirrorReader

    assert isinstance(source, MirrorReader)
    editor = MirrorEditor(source.mirror)
    editor.open(otherwise=otherwise)
    try:
        yield editor
    finally:
        editor.close()


@contextlib.contextmanager
def _locked(store: CheckpointStore, otherwise: str) -> Iterator[None]:
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
