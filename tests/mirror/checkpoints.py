"""Small committed checkpoints made by hand, a store in memory to upload them to, and its checks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from obstore.store import LocalStore, MemoryStore

from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import CHECKPOINTS, Marker, digest_of, step_of_marker
from checkfreq.mirror.settings import Mirror
from checkfreq.store.digests import digest_pieces, piece_bytes_of
from checkfreq.store.manifest import FileEntry, Manifest, TensorEntry
from checkfreq.store.store import CheckpointStore
from checkfreq.types import PAGE_BYTES, TensorSpec

MIB = 1 << 20
Files = Mapping[str, Mapping[str, bytes]]


class Place:
    """A directory, and where it is mirrored to."""

    def __init__(self, folder: Path, mirror: Mirror | None = None) -> None:
        self.store = CheckpointStore(folder)
        self.remote = memory_remote(mirror)

    def serve(self, kind: type[RemoteObjects]) -> Any:
        """From now on the place is of this kind."""
        self.remote = kind(self.remote._mirror, store=self.remote._store)
        return self.remote


def memory_remote(mirror: Mirror | None = None) -> RemoteObjects:
    """An object store in memory that honours every condition."""
    return RemoteObjects(mirror or Mirror("memory:///test"), store=MemoryStore())


def local_remote(folder: Path) -> RemoteObjects:
    """One in a folder, which cannot replace an object on a condition."""
    return RemoteObjects(Mirror(folder.as_uri()), store=LocalStore(folder, mkdir=True))


def commit(store: CheckpointStore, step: int, files: Files, *, attempt: str = "a") -> Manifest:
    """Commit a step whose tensors have these bytes."""
    store.open()
    pending = store.begin(step, attempt=attempt)
    entries = []
    for name, tensors in files.items():
        entry, data = image(name, tensors)
        payload = pending.create_payload(name, len(data))
        payload.pwrite(memoryview(data), 0)
        pending.finish_payload(payload, len(data))
        entries.append(entry)
    manifest = Manifest(step, attempt, 1, 1.5, {"checkfreq": "0"}, tuple(entries), {})
    store.commit(pending, manifest)
    return manifest


def image(name: str, tensors: Mapping[str, bytes]) -> tuple[FileEntry, bytes]:
    """A file's entry and its bytes."""
    at, entries, head = PAGE_BYTES, [], {}
    for tensor, data in tensors.items():
        pieces = piece_bytes_of(len(data))
        cut = TensorSpec(tensor, "uint8", (len(data),), at, len(data), pieces)
        digest = digest_pieces(memoryview(data), cut)
        entries.append(
            TensorEntry(tensor, "uint8", (len(data),), at, len(data), digest, cut.piece_bytes)
        )
        start = at - PAGE_BYTES
        head[tensor] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [start, start]}
        at += len(data)
    text = json.dumps(head).encode().ljust(PAGE_BYTES - 8)
    header = (PAGE_BYTES - 8).to_bytes(8, "little") + text
    digest = xxhash.xxh3_64_hexdigest(header)
    entry = FileEntry(name, at, PAGE_BYTES, digest, tuple(entries))
    return entry, header + b"".join(tensors.values())


def noise(num_bytes: int) -> bytes:
    """Bytes that no other call returns."""
    return os.urandom(num_bytes)


def markers(remote: RemoteObjects) -> dict[int, Marker]:
    """Every marker, after checking that each object it names is there, with its content."""
    found = {}
    for key in remote.list(CHECKPOINTS):
        step = step_of_marker(key)
        assert step is not None, key
        marker = Marker.decode(remote.get(key)[0], key=key)
        contents(remote, marker)
        found[step] = marker
    return found


def contents(remote: RemoteObjects, marker: Marker) -> dict[str, bytes]:
    """The files of a checkpoint, and its record, put together from its objects."""
    files = {"manifest.json": _checked(remote, marker.manifest.key, marker.manifest.digest)}
    for name, pieces in marker.files.items():
        files[name] = b"".join(_checked(remote, p.key, p.digest) for p in pieces)
    return files


def on_disk(store: CheckpointStore, step: int) -> dict[str, bytes]:
    """The files of a committed step."""
    return {path.name: path.read_bytes() for path in store.path(step).iterdir()}


def _checked(remote: RemoteObjects, key: str, digest: str) -> bytes:
    data, _ = remote.get(key, max_bytes=1 << 30)
    assert digest_of(data) == digest, f"{key} has other contents"
    return data
