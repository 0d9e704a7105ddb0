"""What the records of many ranks cost: the leader at a commit, and one rank at a restore.

    python -m benchmarks.ranks --records 16 256 4096

Every rank's part is written once, as its worker would: 1,000 tensors sharded by rows as FSDP2 does,
its positions, and a payload of the right length with nothing in it. Then, in processor time:

``commit``: what the leader's worker does once all parts are there, up to the durable record.
``restore``: what one rank of as many reads and plans. ``reshard``: the same for one of half as
many. ``merged``: one record of all ranks, as fewer ranks write it. ``DCP``: the global plan of
torch.distributed.checkpoint and its pickled ``.metadata``, and reading it to plan the same shards.
With an arm, the lines say how many bytes the record has that every rank reads.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from benchmarks.lab.record import emit
from checkfreq.restore.needed_files import needed_files
from checkfreq.restore.record_reader import RecordReader
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.store.boxes import Box
from checkfreq.store.joint import JointStore
from checkfreq.store.manifest import FileEntry, Manifest, TensorEntry
from checkfreq.store.outline import encode_part
from checkfreq.store.parts import file_of, part_name
from checkfreq.store.store import Pending
from checkfreq.types import Json, Role
from iterators.order.position import Identity, Layout, Position

_TENSORS = 1000
#: Rows of the tensors, in turn; each row has 64 float32.
_ROWS, _WIDTH, _ITEM_BYTES = (4096, 11008, 12288, 32000), 64, 4
_HEADER_BYTES = 4096
#: Above this DCP's global plan, and a merged record, would take minutes and gigabytes.
_MOST_ELSEWHERE = 256
_STEP, _ATTEMPT = 7, "synthetic"

Shards = dict[str, tuple[tuple[int, ...], Box]]


def measure_records(worlds: list[int]) -> None:
    """Print a line for each arm of each number of ranks."""
    for world in worlds:
        for is_tree in (True, False):
            if is_tree or world <= _MOST_ELSEWHERE:
                with tempfile.TemporaryDirectory(prefix="records-") as folder:
                    _measure_ours(Path(folder), world, is_tree=is_tree)
        if world <= _MOST_ELSEWHERE:
            _measure_dcp(world)


def _measure_ours(folder: Path, world: int, *, is_tree: bool) -> None:
    store = JointStore(folder, is_tree=is_tree)
    store.open()
    pending = store.lead(_STEP, attempt=_ATTEMPT)
    leader = _part(0, world)
    for rank in range(world):
        part = leader if rank == 0 else _part(rank, world)
        _make_payloads(pending, part)
        if rank:
            data = encode_part(part) if is_tree else part.encode()
            store.ops.write_file(pending.make_way(part_name(rank)), data)
    arm = "tree" if is_tree else "merged"

    def commit() -> None:
        store.commit(pending, store.merge_parts(pending, leader, range(1, world)))

    seconds = _processor_s(commit)
    record_bytes = len(store.record(_STEP))
    _report("commit", arm, world, seconds, record_bytes)
    for what, readers in (("restore", world), ("reshard", world // 2)):
        seconds = _processor_s(partial(_plan, store, readers))
        _report(what, arm, world, seconds, record_bytes)


def _plan(store: JointStore, world: int) -> None:
    """What a rank in the middle of ``world`` reads, and decides to read."""
    role = Role(world // 2, world, tuple(range(world)))
    chk = cast(CFCheckpoint, _Live(_shards(role.rank, world)))
    reader = RecordReader(store, store.head(_STEP), role=role)
    for _, stage in reader.stages(chk):
        stage()
    needed = needed_files(chk, reader.manifest, role)
    files = [file for file in reader.manifest.files if file.name in needed]
    store.check_sizes(_STEP, files)
    assert files, "a rank needs at least one file"


class _Live:
    """A tracked model of which this rank holds shards."""

    def __init__(self, shards: Shards) -> None:
        self.adapters = {"model": self}
        self._boxes = {key: box for key, (_, box) in shards.items()}

    def holdings(self) -> Callable[[str, tuple[int, ...]], tuple[Box, ...]]:
        return lambda key, shape: (self._boxes[key],)


def _shards(rank: int, world: int) -> Shards:
    found: Shards = {}
    for number in range(_TENSORS):
        rows = _ROWS[number % len(_ROWS)]
        size = -(-rows // world)
        begin = min(rank * size, rows)
        box = Box((begin, 0), (min(size, rows - begin), _WIDTH))
        found[f"layers.{number}.feed_forward.weight"] = ((rows, _WIDTH), box)
    return found


def _part(rank: int, world: int) -> Manifest:
    shards = {key: one for key, one in _shards(rank, world).items() if one[1].num_elements}
    entries, end = [], _HEADER_BYTES
    for number, (key, (_, box)) in enumerate(shards.items()):
        num_bytes = box.num_elements * _ITEM_BYTES
        digest = f"{rank << 16 | number:016x}"
        entries.append(TensorEntry(key, "float32", box.sizes, end, num_bytes, digest))
        end += num_bytes
    file = FileEntry(file_of("model", rank), end, _HEADER_BYTES, "0" * 16, tuple(entries))
    places = {key: [list(shape), list(box.offsets)] for key, (shape, box) in shards.items()}
    own: Json = {"model": {"shards": places}, "$positions": {"train": _position(rank, world)}}
    objects = {"model": _listed(world)} if rank == 0 else {}
    return Manifest(_STEP, _ATTEMPT, world, time.time(), {}, (file,), objects, {rank: own})


def _listed(world: int) -> Json:
    listed = {key: ["float32", list(shape)] for key, (shape, _) in _shards(0, world).items()}
    return {"kind": "module", "class": "synthetic", "sharded_tensors": listed}


def _position(rank: int, world: int) -> Json:
    identity = Identity("feistel-1", 1_281_167, "ImageNet:1281167", 5)
    layout = Layout(world, 32, 4, (("torch", torch.__version__),))
    return Position(identity, 3, 1000 * world, _STEP, layout=layout, ranks=(rank,)).to_dict()


def _make_payloads(pending: Pending, part: Manifest) -> None:
    for file in part.files:
        path = pending.make_way(file.name)
        path.touch()
        os.truncate(path, file.num_bytes)


def _measure_dcp(world: int) -> None:
    plans = [SavePlan(list(_write_items(rank, world))) for rank in range(world)]
    found: list[bytes] = []

    def commit() -> None:
        _, metadata = create_default_global_save_plan(plans)
        found.append(pickle.dumps(metadata))

    seconds = _processor_s(commit)
    _report("commit", "DCP", world, seconds, len(found[0]))
    for what, readers in (("restore", world), ("reshard", world // 2)):
        seconds = _processor_s(partial(_plan_dcp, found[0], readers))
        _report(what, "DCP", world, seconds, len(found[0]))


def _plan_dcp(pickled: bytes, world: int) -> None:
    metadata: Metadata = pickle.loads(pickled)
    for key, (_, box) in _shards(world // 2, world).items():
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        stored: Any = metadata.state_dict_metadata[key]
        assert create_read_items_for_chunk_list(key, stored, [chunk])


def _write_items(rank: int, world: int) -> Iterator[WriteItem]:
    properties = TensorProperties(torch.float32)
    for key, (shape, box) in _shards(rank, world).items():
        if box.num_elements:
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            data = TensorWriteData(chunk, properties, torch.Size(shape))
            index = MetadataIndex(key, chunk.offsets)
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _processor_s(act: Callable[[], object]) -> float:
    begin_s = time.process_time()
    act()
    return time.process_time() - begin_s


def _report(what: str, arm: str, world: int, seconds: float, record_bytes: int) -> None:
    fields = {"seconds": round(seconds, 4)} if arm == "tree" and what != "reshard" else {}
    emit(
        "ranks",
        what=what,
        ranks=world,
        arm=arm,
        tensors=_TENSORS,
        processor_s=round(seconds, 4),
        record_bytes=record_bytes,
        **fields,
    )
