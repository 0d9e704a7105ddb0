"""Checkpoints of given tensors, and files that note or disturb how they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from checkfreq.store.digests import digest_pieces
from checkfreq.store.fileops import LocalFileOps, ReadFile
from checkfreq.store.manifest import FileEntry, Manifest, TensorEntry, digest_of
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import page_aligned
from checkfreq.types import TensorSpec

PAGE = 4096


def commit_tensors(
    store: CheckpointStore,
    step: int,
    files: Mapping[str, Mapping[str, bytes]],
    *,
    piece_bytes: int = 0,
) -> Manifest:
    """Commit files with one uint8 tensor per name, one after another behind a header of a page.

    ``piece_bytes``: of every tensor that has more bytes; 0: no tensor is cut.
    """
    pending = store.begin(step, attempt=f"a{step}")
    entries = []
    for name, tensors in files.items():
        header = bytes(PAGE)
        image = header + b"".join(tensors.values())
        payload = pending.create_payload(name, len(image))
        payload.pwrite(memoryview(page_aligned(image)), 0)
        pending.finish_payload(payload, len(image))
        found = tuple(_entries(tensors, piece_bytes))
        entries.append(FileEntry(name, len(image), PAGE, digest_of(header), found))
    store.commit(pending, Manifest(step, f"a{step}", 1, 0.0, {}, tuple(entries), {}))
    return store.manifest(step)


def _entries(tensors: Mapping[str, bytes], piece_bytes: int) -> list[TensorEntry]:
    entries, offset = [], PAGE
    for name, data in tensors.items():
        cut = TensorSpec(
            name, "uint8", (len(data),), offset, len(data), piece_bytes * (len(data) > piece_bytes)
        )
        digest = digest_pieces(memoryview(data), cut)
        entries.append(TensorEntry(**{**asdict(cut), "digest": digest}))
        offset += len(data)
    return entries


def damage(store: CheckpointStore, step: int, name: str, at: int) -> None:
    """Change one byte of a payload."""
    path = store.path(step) / name
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


class Watched(LocalFileOps):
    """File operations that note each read; ``disturb`` is called before each of a payload.

    ``short``: bytes by which each read of a payload is shortened.
    """

    def __init__(
        self,
        root: Path,
        *,
        disturb: Callable[[int], object] = lambda number: None,
        short: int = 0,
    ) -> None:
        super().__init__(root)
        self.disturb, self.short = disturb, short
        self.reads: list[tuple[int, int]] = []
        self.opened = self.closed = 0
        self._lock = threading.Lock()

    def open_for_read(self, path: Path) -> ReadFile:
        self.opened += 1
        return _WatchedFile(super().open_for_read(path), self)

    def note(self, start: int, num_bytes: int) -> None:
        """A read begins."""
        with self._lock:
            self.reads.append((start, num_bytes))
            number = len(self.reads)
        self.disturb(number)


class _WatchedFile:
    def __init__(self, file: ReadFile, ops: Watched) -> None:
        self._file, self._ops = file, ops

    @property
    def size(self) -> int:
        return self._file.size

    @property
    def direct(self) -> bool:
        return self._file.direct

    def preadinto(self, view: memoryview, offset: int) -> int:
        self._ops.note(offset, len(view))
        return self._file.preadinto(view, offset) - self._ops.short

    def close(self) -> None:
        self._ops.closed += 1
        self._file.close()
