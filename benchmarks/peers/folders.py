"""A saver for a library that writes a checkpoint into a folder and reads it back."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from benchmarks.lab.saver import Saved


@dataclass(frozen=True, slots=True)
class Pending:
    """How to wait for the background: until all is written; until the state may change."""

    written: Callable[[], object]
    copied: Callable[[], object] | None = None


class Library(Protocol):
    """How a library writes the training's state, and reads it into the live training."""

    def save(self, folder: Path) -> Pending | None:
        """Write into the empty folder; returns what continues in the background, if anything."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what was written there."""
        ...

    def close(self) -> None:
        """Release threads, processes and memory."""
        ...


class InFolders:
    """A folder per checkpoint: ``step-1``, ``step-2``, ...

    ``sync``: files and folders are synced after the library's own write, in the training thread or
    in the background, wherever the library writes.
    """

    def __init__(self, folder: Path, library: Library, *, sync: bool) -> None:
        self._folder, self._library, self._sync = folder, library, sync
        self._count, self._began_s, self._durable_s = 0, 0.0, 0.0
        self._thread = ThreadPoolExecutor(1)
        self._completing: Future[None] | None = None
        self._copied: Callable[[], object] | None = None

    def boundary(self, *, save: bool) -> None:
        """The library's own call, and the sync if it does not write in the background."""
        if not save:
            return
        self._count += 1
        self._began_s = time.perf_counter()
        self._newest.mkdir(parents=True, exist_ok=True)  # the ranks of a run share the folder
        pending = self._library.save(self._newest)
        self._completing = self._copied = None
        if pending is None:
            self._complete()
            return
        self._copied = pending.copied
        self._completing = self._thread.submit(self._complete, pending.written)

    def _complete(self, written: Callable[[], object] | None = None) -> None:
        if written is not None:
            written()
        if self._sync:
            sync_all(self._newest)
        self._durable_s = time.perf_counter() - self._began_s

    @property
    def _newest(self) -> Path:
        return self._folder / f"step-{self._count}"

    def updating(self) -> AbstractContextManager[None]:
        """How to wait for the background: until all is written; until the state may change."""
        return self._after_copy()

    @contextlib.contextmanager
    def _after_copy(self) -> Iterator[None]:
        if self._copied is not None:
            self._copied()
            self._copied = None
        yield

    def is_durable(self) -> bool:
        """Whether the background work is done."""
        return self._completing is None or self._completing.done()

    def is_quiet(self) -> bool:
        """The checkpoint before is removed by `finish`."""
        return self.is_durable()

    def finish(self) -> Saved:
        """An unsynced save is synced here, untimed: its write-back must not slow other arms."""
        if self._completing is not None:
            self._completing.result()
        if dist.is_initialized():
            dist.barrier()
        if not self._sync:
            sync_all(self._newest)
        began_s = time.perf_counter()
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(self._folder / f"step-{self._count - 1}", ignore_errors=True)
        return Saved(self._durable_s, removal_s=time.perf_counter() - began_s)

    def prepare_restore(self) -> None:
        """A library is ready to read."""

    def restore(self) -> None:
        """Restore with the library's own function."""
        self._library.load(self._newest)

    def rest(self) -> None:
        """A library does no background work after a restore."""

    def files(self) -> list[Path]:
        """All files of the newest folder."""
        return sorted(path for path in self._newest.rglob("*") if path.is_file())

    def discard(self) -> None:
        """The newest folder, with all that is in it."""
        shutil.rmtree(self._newest)

    def close(self) -> None:
        """Close the library after the last save."""
        self._thread.shutdown()
        self._library.close()


def sync_all(folder: Path) -> None:
    """Sync every file in the folder, every folder in it, itself, and its entry in its parent."""
    paths = sorted(folder.rglob("*"), reverse=True)  # contents before their folder
    for path in [*paths, folder, folder.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
