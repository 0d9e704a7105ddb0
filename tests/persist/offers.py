"""Made-up offers: a slot in memory, its snapshot, and a record with digests that are right."""

from __future__ import annotations

import os
from dataclasses import replace

from checkfreq.persist.frames import Stage
from checkfreq.persist.offer import Body, Snapshot, extras_of
from checkfreq.store.manifest import FileEntry, Manifest, TensorEntry, digest_of
from checkfreq.types import Role
from tests.persist.conftest import PAGE, file_image, request, round_up


def snapshot_in(fd: int, *, step: int = 7, slot: int = 0, stage: Stage = Stage.DURABLE) -> Snapshot:
    """Write a snapshot into the memory behind ``fd``, and describe it."""
    spec, image = file_image("model.safetensors", PAGE, {"a": 5000, "b": 0, "c": 3})
    os.ftruncate(fd, PAGE + round_up(len(image)))
    os.pwrite(fd, image, PAGE)
    tensors = []
    for t in spec.tensors:
        digest = digest_of(image[t.offset : t.offset + t.num_bytes])
        tensors.append(TensorEntry(t.name, t.dtype, t.shape, t.offset, t.num_bytes, digest))
    header = digest_of(image[: spec.header_bytes])
    file = FileEntry(spec.name, spec.num_bytes, spec.header_bytes, header, tuple(tensors))
    wanted = request(step, slot=slot, keep=True, metrics={"loss": 0.5})
    manifest = Manifest(step, wanted.attempt, 1, 0.0, wanted.versions, (file,), wanted.objects)
    size, places, extras = os.fstat(fd).st_size, {spec.name: PAGE}, extras_of(wanted)
    record = manifest.encode()
    return Snapshot(step, wanted.attempt, slot, size, stage, places, extras, record)


def body_of(snapshot: Snapshot) -> Body:
    """An offer of one slot."""
    return Body(Role(), ((snapshot.slot, snapshot.slot_bytes),), (snapshot,))


def changed(snapshot: Snapshot, **fields: object) -> Snapshot:
    """The snapshot with other fields, decoded anew."""
    return replace(snapshot, **fields)  # type: ignore[arg-type]
