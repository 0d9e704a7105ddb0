"""``CFStorageReader``: torch.distributed.checkpoint loads what checkfreq wrote.

It reads what the plan needs of each tensor, verified, with direct I/O, and straight into its place.
The number of ranks may differ from that of the save. A step counts as valid here if its manifest
and the sizes of its files are right. Digests are checked for what is read, not for the rest.
"""

from __future__ import annotations

import io
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from checkfreq.errors import ConfigError, MismatchError, storage_errors
from checkfreq.integrations.dcp.chunks import StoredTensor
from checkfreq.integrations.dcp.contents import Contents, contents_of, is_of_dcp
from checkfreq.integrations.dcp.paths import split_path
from checkfreq.restore.reading import StreamReader
from checkfreq.restore.validation import validate_state
from checkfreq.state.saved_tensor import Chunk, Placement, placed
from checkfreq.state.tensors import DTYPES
from checkfreq.store.boxes import Box
from checkfreq.store.manifest import MANIFEST_NAME, Manifest
from checkfreq.store.store import CheckpointStore

logger = logging.getLogger(__name__)


class _Chosen(NamedTuple):
    """Identifies the checkpoint that a rank reads: all ranks must read the same one."""

    step: int
    attempt: str
    created_unix_s: float


class CFStorageReader(StorageReader):
    """Lets torch.distributed.checkpoint (DCP) load from a checkfreq directory.

    ``path`` is a run's ``chk_dir``, or one ``step-...`` directory in it. Without ``step`` the
    newest valid step is read; a damaged one is skipped, with a warning.

    Names are ``<tracked name>.<key>``, as in ``{"model": model.state_dict(), "optimizer":
    optimizer.state_dict()}``. The state of an optimizer is by parameter number; with
    ``parameter_names={"optimizer": [names in the order of its parameters]}`` it is by name, as
    ``get_optimizer_state_dict`` has it. State that differs between ranks is that of the same
    rank, or of the first rank if the checkpoint has no such rank. Values that are not tensors are
    pickled in memory, for DCP's planner, which expects them so.

    Nothing in a CFManager's checkpoint is pickled on disk. In one of ``CFStorageWriter`` the
    values that are not tensors are, and unpickling can run any code. Reading one raises
    ConfigError, unless you pass ``trust_pickle=True`` because you know who wrote it.

    Works with any number of ranks, with or without a process group. DCP wraps errors in its
    CheckpointException: a CorruptCheckpointError for damage in what was read, and an
    AssertionError with our message for what went wrong while finding the step
    (CorruptCheckpointError, NoCheckpointError, ConfigError). DCP loads in place: what was loaded
    before an error stays loaded.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        step: int | None = None,
        *,
        parameter_names: Mapping[str, Sequence[str]] | None = None,
        num_threads: int = 4,
        trust_pickle: bool = False,
    ) -> None:
        self._parameter_names = dict(parameter_names or {})
        self._trusts_pickle = trust_pickle
        self._num_threads = num_threads
        self._go_to(path, step)

    @property
    def checkpoint_id(self) -> str:
        """The path that was given."""
        return str(self._path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the path holds a checkfreq checkpoint."""
        root, step = split_path(checkpoint_id)
        steps = CheckpointStore(root).steps()
        return bool(steps) if step is None else step in steps

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read a different directory from now on, or the same one again."""
        self._go_to(self._path if checkpoint_id is None else checkpoint_id, self._asked)

    def _go_to(self, path: str | os.PathLike[str], step: int | None) -> None:
        self._path, self._asked = Path(path), step
        root, named = split_path(path)
        self._step = named if step is None else step
        self._store = CheckpointStore(root)
        self._manifest: Manifest | None = None
        self._contents = Contents()
        self._load_id = uuid.uuid4().hex

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Choose the step, and describe what it holds. Every rank calls it."""
        with storage_errors(f"reading {self._path}"):
            self._manifest, self._contents = self._find()
        described: dict[str, Any] = {
            name: _describe(self._contents.tensors.get(name)) for name in self._contents.names
        }
        return Metadata(
            state_dict_metadata=described,
            planner_data=self._contents.planner_data,
            storage_meta=StorageMeta(
                checkpoint_id=self.checkpoint_id,
                save_id=self._contents.save_id,
                load_id=self._load_id,
            ),
        )

    def _find(self) -> tuple[Manifest, Contents]:
        if self._step is not None:
            self._store.require(self._step)
            return self._look_into(self._step)
        found, rejected = self._store.newest_valid(check=self._look_into)
        for skipped in rejected:
            logger.warning("step %d is skipped: %s", skipped.step, skipped.error)
        return found

    def _look_into(self, step: int) -> tuple[Manifest, Contents]:
        manifest = self._store.inspect(step)
        path = str(self._store.path(step) / MANIFEST_NAME)
        if not self._trusts_pickle and is_of_dcp(manifest):
            raise ConfigError(
                f"step {step} in {self._store.root} was written by torch.distributed.checkpoint, "
                "which pickles values that are not tensors: loading it can run any code that its "
                "author put there. If you wrote it, pass CFStorageReader(trust_pickle=True)"
            )
        contents = contents_of(
            manifest, rank=_rank(), path=path, parameter_names=self._parameter_names
        )
        validate_state(manifest, path=path)
        return manifest, contents

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: `read_metadata` has found everything."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell the coordinator which checkpoint this rank found."""
        assert self._manifest is not None, "read_metadata comes first"
        chosen = self._manifest
        return replace(
            plan, storage_data=_Chosen(chosen.step, chosen.attempt, chosen.created_unix_s)
        )

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks found the same step: one may have been committed in between."""
        found = [plan.storage_data for plan in plans]
        for rank, chosen in enumerate(found):
            if chosen != found[0]:
                raise ConfigError(
                    f"ranks 0 and {rank} of this load found different checkpoints in "
                    f"{self._store.root}: {found[0]} and {chosen}. Pass step=, and check that all "
                    "ranks read the same directory"
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for into the planner's tensors. The future is done on return."""
        reads: list[tuple[ReadItem, Placement]] = []
        for item in plan.items:
            chunk = self._chunk(item)
            if chunk is None:
                value = self._contents.pickled(item.storage_index.fqn, self._read_whole)
                planner.load_bytes(item, value)
            elif item.type is LoadItemType.BYTE_IO:
                reads.append((item, _blob(chunk)))
            else:
                reads.append((item, self._placement(item, chunk, planner)))
        self._read([placement for _, placement in reads])
        for item, placement in reads:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(bytes(placement.target.numpy())))
            else:
                planner.commit_tensor(item, placement.target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, item: ReadItem) -> Chunk | None:
        """The chunk to read for an item; None for a value, which is in the manifest."""
        index = item.storage_index
        if item.type is LoadItemType.BYTE_IO:
            blob = self._contents.blobs.get(index.fqn)
            return None if blob is None else blob.chunks[0]
        chunks = self._contents.tensors[index.fqn].chunks
        offsets = chunks[0].box.offsets if index.offset is None else tuple(index.offset)
        hinted = [] if index.index is None else chunks[index.index : index.index + 1]
        return next(chunk for chunk in [*hinted, *chunks] if chunk.box.offsets == offsets)

    def _placement(self, item: ReadItem, chunk: Chunk, planner: LoadPlanner) -> Placement:
        target = planner.resolve_tensor(item).detach()
        part = Box(tuple(item.storage_offsets), tuple(item.lengths))
        if tuple(target.size()) != part.sizes:
            name = item.storage_index.fqn
            text = f"{name}: checkpoint has {list(part.sizes)}, the plan {list(target.size())}"
            raise MismatchError(self.checkpoint_id, different=[text])
        return Placement(chunk, part, target)

    def _read_whole(self, tensor: StoredTensor) -> Tensor:
        whole = tensor.empty()
        self._read(
            [
                Placement(chunk, Box.whole(chunk.box.sizes), whole[_slices(*chunk.box)])
                for chunk in tensor.chunks
            ]
        )
        return whole

    def _read(self, placements: Sequence[Placement]) -> None:
        assert self._manifest is not None, "read_metadata comes first"
        step = self._manifest.step
        with storage_errors(f"reading {self._store.path(step)}"):
            reader = StreamReader(self._store, step, num_threads=self._num_threads)
            reader.read([placed(*one) for one in placements if one.part.num_elements])


def _blob(chunk: Chunk) -> Placement:
    """All bytes of a chunk, in memory of its own."""
    values = torch.empty(chunk.box.sizes, dtype=DTYPES[chunk.entry.dtype], device="cpu")
    return Placement(chunk, Box.whole(chunk.box.sizes), values)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))


def _describe(tensor: StoredTensor | None) -> TensorStorageMetadata | BytesStorageMetadata:
    if tensor is None:
        return BytesStorageMetadata()
    chunks = [
        ChunkStorageMetadata(
            offsets=torch.Size(chunk.box.offsets), sizes=torch.Size(chunk.box.sizes)
        )
        for chunk in tensor.chunks
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks
    )
