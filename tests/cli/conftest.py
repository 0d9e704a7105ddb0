"""A directory of small checkpoints, written through the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkfreq.store.manifest import FileEntry, Manifest, TensorEntry, digest_of
from checkfreq.store.store import CheckpointStore

HEADER = b"\x08\0\0\0\0\0\0\0{}      "
WEIGHT = bytes(range(24))

Write = Callable[[int], Path]


def entry() -> FileEntry:
    weight = TensorEntry(
        "fc.weight", "float32", (2, 3), len(HEADER), len(WEIGHT), digest_of(WEIGHT)
    )
    size = len(HEADER) + len(WEIGHT)
    return FileEntry("model.safetensors", size, len(HEADER), digest_of(HEADER), (weight,))


def commit(store: CheckpointStore, step: int) -> Path:
    pending = store.begin(step, attempt="a1")
    payload = pending.create_payload("model.safetensors", 4096)
    payload.pwrite(memoryview(HEADER + WEIGHT), 0)
    pending.finish_payload(payload, len(HEADER) + len(WEIGHT))
    manifest = Manifest(
        step=step,
        attempt="a1",
        world=1,
        created_unix_s=1.8e9,
        versions={"checkfreq": "0.1.0"},
        files=(entry(),),
        objects={"scheduler": {"last_epoch": step}},
    )
    return store.commit(pending, manifest).path


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "chk")
    store.open()
    return store


@pytest.fixture
def write(store: CheckpointStore) -> Write:
    """Commit a checkpoint of a step; returns its directory."""
    return lambda step: commit(store, step)
