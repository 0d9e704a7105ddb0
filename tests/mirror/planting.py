"""Puts checkpoints of a directory into a mirror, as a reader finds them there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from checkfreq.mirror import layout
from checkfreq.mirror.layout import Blob, Marker
from checkfreq.mirror.settings import Mirror
from checkfreq.store.manifest import MANIFEST_NAME
from checkfreq.store.store import CheckpointStore

PIECE_BYTES = 1000


class Planted:
    """A mirror in a folder, at ``url``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mirror = Mirror(folder.as_uri())

    @property
    def url(self) -> str:
        return self.mirror.url

    def put(self, key: str, data: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def plant(
        self,
        store: CheckpointStore,
        step: int,
        *,
        change: Callable[[Marker], Marker] = lambda marker: marker,
        piece_bytes: int = PIECE_BYTES,
    ) -> Marker:
        """Copy a committed step; the marker last."""
        manifest = store.manifest(step)
        record = store.record(step)
        files = {
            file.name: self._pieces(store.path(step) / file.name, piece_bytes)
            for file in manifest.files
        }
        key = layout.manifest_key(step, manifest.attempt)
        blob = Blob(key, len(record), layout.digest_of(record))
        self.put(key, (store.path(step) / MANIFEST_NAME).read_bytes())
        marker = change(Marker(step, manifest.attempt, manifest.created_unix_s, blob, files))
        self.put(layout.marker_key(step), marker.encode())
        return marker

    def _pieces(self, path: Path, piece_bytes: int) -> tuple[Blob, ...]:
        data, found = path.read_bytes(), []
        for start in range(0, len(data), piece_bytes):
            piece = data[start : start + piece_bytes]
            blob = Blob.piece(layout.digest_of(piece), len(piece))
            self.put(blob.key, piece)
            found.append(blob)
        return tuple(found)

    def path_of(self, key: str) -> Path:
        return self.folder / key
