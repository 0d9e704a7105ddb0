"""``CFStorageWriter``: torch.distributed.checkpoint writes into a checkfreq directory.

The directory, files, digests and commit are those of a CFManager. The ranks agree through DCP's own
steps. Before any rank writes, the coordinator has locked the directory and made the temporary one.
Each rank's file is durable when its `write_data` returns, and its description reaches `finish` with
DCP's results. The manifest is written after all files, and then the directory is renamed.
"""

from __future__ import annotations

import io
import math
import os
import platform
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from checkfreq import __version__
from checkfreq.errors import ConfigError, StateError
from checkfreq.integrations.dcp.commit import ATTEMPT, Commit, join
from checkfreq.integrations.dcp.contents import DCP
from checkfreq.integrations.dcp.paths import split_path
from checkfreq.persist.writer import RateLimiter, SnapshotWriter
from checkfreq.restore.buffers import new_buffer
from checkfreq.snapshot.layout import StateLayout
from checkfreq.state.codec import encode_tree
from checkfreq.state.collector import CapturedState, TensorRef
from checkfreq.state.tensors import detached
from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.store.parts import stem_of
from checkfreq.store.store import CheckpointStore, Pending
from checkfreq.types import Json

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Assignment:
    """What the coordinator tells each rank. Planners may cache it: it is the same at each save."""

    rank: int
    world: int


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank wrote: its file, and the JSON about it."""

    rank: int
    step: int
    entry: FileEntry | None
    json: dict[str, Json]


class CFStorageWriter(StorageWriter):
    """Lets torch.distributed.checkpoint (DCP) save into a checkfreq directory.

    For ``dcp.save`` and ``dcp.async_save`` (thread or process). ``path`` is the directory of all
    steps, which all ranks must see, and ``step`` the number of this checkpoint. If the step exists
    already, that is an error; with ``overwrite`` it and all later steps are moved to
    ``superseded/``. Load with `CFStorageReader`. Values that are not tensors are stored as DCP's
    planner serialises them: with ``torch.save``, which is pickle.

    The coordinator holds the directory's lock from planning to commit. It waits at most
    ``lock_timeout_s`` for it, then raises ConfigError: a CFManager is running there. Each rank
    needs host memory for a copy of what it writes. After a failure on another rank this writer
    keeps the lock until it is used again, closed or garbage collected. DCP wraps errors in its
    CheckpointException.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        overwrite: bool = False,
        num_threads: int = 4,
        lock_timeout_s: float = 5.0,
    ) -> None:
        self._overwrite = overwrite
        self._num_threads = num_threads
        self._lock_timeout_s = lock_timeout_s
        self._commit: Commit | None = None
        self._save_id = uuid.uuid4().hex
        self._go_to(path, step)

    def _go_to(self, path: str | os.PathLike[str], step: int | None) -> None:
        self._root, named = split_path(path)
        chosen = named if step is None else step
        if chosen is None or chosen < 0:
            raise ConfigError(
                f"CFStorageWriter({str(path)!r}, step={chosen}): expected a step from 0, or a path "
                "that ends in step-00000120 or the like"
            )
        self._step = chosen

    @property
    def checkpoint_id(self) -> str:
        """Path of the checkpoint once it is committed."""
        return str(self._root / f"step-{self._step:08d}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the path names a step."""
        return split_path(checkpoint_id)[1] is not None

    def storage_meta(self) -> StorageMeta:
        """See StorageWriter."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start over; at a different path if one is given, which must end in a step."""
        self.close()
        self._save_id = uuid.uuid4().hex
        if checkpoint_id is not None:
            self._go_to(checkpoint_id, None)

    def close(self) -> None:
        """Give up an unfinished save and its lock; idempotent."""
        if self._commit is not None:
            self._commit.give_up()
            self._commit = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_commit": None}  # the process of async_save takes the lock itself

    # DCP calls these in this order.

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See StorageWriter."""
        self.close()
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "CFStorageWriter makes one checkpoint of all ranks: use_collectives=False is not "
                "supported"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See StorageWriter."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before any rank writes: take the lock, make the directory."""
        self._commit = Commit(self._root, self._step, overwrite=self._overwrite)
        num_bytes = sum(_planned_bytes(item) for plan in plans for item in plan.items)
        self._commit.begin(num_bytes=num_bytes, lock_timeout_s=self._lock_timeout_s)
        world = len(plans)
        return [replace(p, storage_data=_Assignment(r, world)) for r, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync this rank's file. The future is done on return."""
        try:
            part = self._write_part(plan, planner)
        except BaseException:
            self.close()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [WriteResult(item.index, _planned_bytes(item), part) for item in plan.items]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit. On the coordinator, after all ranks have written."""
        assert self._commit is not None, "prepare_global_plan comes first"
        try:
            parts = [self._part_of(rank, of_rank) for rank, of_rank in enumerate(results)]
            self._commit.finish(self._manifest(parts, metadata.planner_data))
        finally:
            self.close()

    # The steps of the above.

    def _write_part(self, plan: SavePlan, planner: SavePlanner) -> _Part:
        assignment = plan.storage_data
        if not isinstance(assignment, _Assignment):
            raise ConfigError(
                f"{type(planner).__qualname__} dropped the plan's storage_data, which "
                "CFStorageWriter needs"
            )
        stem = DCP if assignment.world == 1 else stem_of(DCP, assignment.rank)
        content = _resolve(plan, planner, stem)
        pending = self._pending()
        try:
            entry = _write(pending, content.refs, num_threads=self._num_threads)
            CheckpointStore(self._root).ops.sync_dir(
                pending.path
            )  # on a network file system, other nodes must see it too
        finally:
            pending.close()
        return _Part(assignment.rank, self._step, entry, content.json())

    def _pending(self) -> Pending:
        if self._commit is not None:
            return self._commit.pending
        return join(self._root, self._step)

    def _part_of(self, rank: int, results: Sequence[WriteResult]) -> _Part:
        if not results:
            return _Part(rank, self._step, None, {"kind": DCP})
        part = results[0].storage_data
        assert isinstance(part, _Part)
        if (part.rank, part.step) != (rank, self._step):
            raise ConfigError(
                f"rank {rank} saved step {part.step} and rank 0 step {self._step}: pass the same "
                "step= on all ranks"
            )
        return part

    def _manifest(self, parts: Sequence[_Part], planner_data: Any) -> Manifest:
        whole = {
            "kind": DCP,
            "planner_data": encode_tree(planner_data, "planner_data"),
            "save_id": self._save_id,
        }
        alone = len(parts) == 1
        return Manifest(
            step=self._step,
            attempt=ATTEMPT,
            world=len(parts),
            created_unix_s=time.time(),
            versions={
                "checkfreq": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            files=tuple(part.entry for part in parts if part.entry is not None),
            objects={DCP: {**parts[0].json, **whole} if alone else whole},
            ranks={} if alone else {part.rank: {DCP: part.json} for part in parts},
        )


def _planned_bytes(item: WriteItem) -> int:
    """Bytes of an item's chunk of a tensor; 0 for a value, whose size the plan does not know."""
    if item.tensor_data is None:
        return 0
    size = math.prod(item.tensor_data.chunk.sizes)
    return size * item.tensor_data.properties.dtype.itemsize


@dataclass(slots=True)
class _Content:
    """The tensors of a rank's file, by keys that are unique in it, and what each one is."""

    refs: list[TensorRef] = field(default_factory=list)
    shards: dict[str, Json] = field(default_factory=dict)
    pieces: dict[str, str] = field(default_factory=dict)
    blobs: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Json]:
        """JSON of the rank's part, without empty fields."""
        fields = {"shards": self.shards, "pieces": self.pieces, "bytes": self.blobs}
        return {"kind": DCP, **{name: value for name, value in fields.items() if value}}


def _resolve(plan: SavePlan, planner: SavePlanner, stem: str) -> _Content:
    content = _Content()
    names = {item.index.fqn for item in plan.items}
    taken: set[str] = set()
    for item in plan.items:
        name = item.index.fqn
        key, number = name, 2
        while key in taken or (key in names and key != name):  # a second chunk of one tensor
            key, number = f"{name}#{number}", number + 1
        taken.add(key)
        if key != name:
            content.pieces[key] = name
        data = planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            content.blobs.append(key)
            data = _as_tensor(data)
        else:
            _note_box(item, key, data, content.shards)
        content.refs.append(TensorRef(stem, key, detached(data, name), False))
    return content


def _as_tensor(data: io.BytesIO) -> Tensor:
    content = bytearray(data.getbuffer())
    if not content:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(content, dtype=torch.uint8)


def _note_box(item: WriteItem, key: str, data: Tensor, shards: dict[str, Json]) -> None:
    assert item.tensor_data is not None
    chunk, size = item.tensor_data.chunk, item.tensor_data.size
    if data.size() != chunk.sizes:
        raise StateError(
            f"{item.index.fqn}: the planner announced {list(chunk.sizes)} and gave "
            f"{list(data.size())}"
        )
    if chunk.sizes != size:
        shards[key] = [list(size), list(chunk.offsets)]


def _write(pending: Pending, refs: list[TensorRef], *, num_threads: int) -> FileEntry | None:
    """Write the tensors to one file and make it durable; None if there are none."""
    if not refs:
        return None
    layout = StateLayout.plan(CapturedState(refs, {}, {}))
    (file,) = layout.files
    image = new_buffer(layout.total_bytes)
    image[: file.header_bytes] = layout.header(0)
    for view, ref in zip(
        layout.views(torch.frombuffer(image, dtype=torch.uint8)), refs, strict=True
    ):
        view.copy_(ref.tensor)
    payload = pending.create_payload(file.name, file.num_bytes)
    writer = SnapshotWriter(
        num_threads=num_threads, chunk_bytes=_CHUNK_BYTES, limiter=RateLimiter(None)
    )
    written = writer.write([file], image, [payload])
    pending.finish_payload(payload, file.num_bytes)
    return written.files[0]
