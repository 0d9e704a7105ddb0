"""Small committed checkpoints made by hand, a store in memory to upload them to, and its checks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from obstore.store import LocalStore, MemoryStore

from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import CHECKPOINTS, Marker, digest_of, step_of_marker
from checkfreq.mirror.settings import Mirror
from checkfreq.store.manifest import Manifest
from checkfreq.store.store import CheckpointStore
from tests.store.ranks import image_of

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
        data, entry = image_of(name, {key: ([len(one)], one) for key, one in tensors.items()})
        payload = pending.create_payload(name, len(data))
        payload.pwrite(memoryview(data), 0)
        pending.finish_payload(payload, len(data))
        entries.append(entry)
    manifest = Manifest(step, attempt, 1, 1.5, {"checkfreq": "0"}, tuple(entries), {})
    store.commit(pending, manifest)
    return manifest


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
