"""A manager's checkpoint of many ranks, written by hand: capture, files, one manifest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from checkfreq.persist.writer import RateLimiter, SnapshotWriter
from checkfreq.restore.buffers import new_buffer
from checkfreq.snapshot.layout import StateLayout
from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.collector import CapturedState
from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.store.parts import check_shards
from checkfreq.store.store import CheckpointStore, Pending
from checkfreq.types import Json, Role

ATTEMPT = "by-hand"


def write_part(
    chk_dir: Path, step: int, chk: CFCheckpoint, role: Role
) -> tuple[CapturedState, tuple[FileEntry, ...]]:
    """Write the files of one rank into the temporary directory, which is there."""
    store = CheckpointStore(chk_dir)
    pending = Pending(step, ATTEMPT, chk_dir / f".tmp-{step}-{ATTEMPT}", store.ops)
    captured = capture(chk, role=role)
    layout = StateLayout.plan(captured)
    image = new_buffer(layout.total_bytes)
    for index, file in enumerate(layout.files):
        image[file.slot_offset : file.slot_offset + file.header_bytes] = layout.header(index)
    views = layout.views(torch.frombuffer(image, dtype=torch.uint8))
    for view, ref in zip(views, captured.tensors, strict=True):
        view.copy_(ref.tensor)
    payloads = [pending.create_payload(file.name, file.num_bytes) for file in layout.files]
    writer = SnapshotWriter(num_threads=1, chunk_bytes=1 << 20, limiter=RateLimiter(None))
    written = writer.write(layout.files, image, payloads)
    for file, payload in zip(layout.files, payloads, strict=True):
        pending.finish_payload(payload, file.num_bytes)
    return captured, written.files


def begin(chk_dir: Path, step: int) -> None:
    """Make the temporary directory."""
    store = CheckpointStore(chk_dir)
    store.open()
    store.begin(step, attempt=ATTEMPT)


def commit(
    chk_dir: Path,
    step: int,
    objects: Json,
    own: Mapping[int, Json],
    files: Sequence[FileEntry],
    *,
    world: int | None = None,
    check: bool = True,
) -> None:
    """Make one checkpoint of the parts."""
    store = CheckpointStore(chk_dir)
    pending = Pending(step, ATTEMPT, chk_dir / f".tmp-{step}-{ATTEMPT}", store.ops)
    manifest = Manifest(
        step=step,
        attempt=ATTEMPT,
        world=world or len(own),
        created_unix_s=time.time(),
        versions={},
        files=tuple(files),
        objects=objects,
        ranks=dict(own),
    )
    if check:
        check_shards(manifest)
    store.commit(pending, manifest)
