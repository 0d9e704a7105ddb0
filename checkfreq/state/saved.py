"""The saved state of one object, and its tensors: in one file, or in shards from many ranks' files.

Nothing here reads a file. The tensors are views of buffers that hold whole files, verified
before; a buffer must not change until a restore has copied what it needs, and may be reused then.
How shards overlap is computed by torch.distributed.checkpoint's planner, as for its own
checkpoints. A tensor that is needed whole, or a box that lies within one chunk, needs no planner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from checkfreq.errors import CorruptCheckpointError, StateError
from checkfreq.state.codec import decode_tree
from checkfreq.state.dtensors import empty_like, is_dtensor, local_of, shard_of
from checkfreq.state.tensors import DTYPES, decode_torch, sizes_of, usable_device
from checkfreq.store.boxes import Box
from checkfreq.store.manifest import TensorEntry
from checkfreq.types import Json


def every_tensor(key: str) -> bool:
    """A choice of tensors: all of them."""
    return True


def no_tensor(key: str) -> bool:
    """A choice of tensors: none."""
    return False


@dataclass(slots=True)
class SavedTensor:
    """One tensor of a checkpoint, as it was before ranks divided it.

    ``chunks``: the boxes of it that files hold, each with its values in the buffer, or None if
    that file was not read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: list[tuple[Box, Tensor | None]] = field(default_factory=list)

    def missing(self, box: Box) -> list[Box]:
        """The parts of ``box`` that were not read, or that no file holds."""
        return box.without(chunk for chunk, values in self.chunks if values is not None)

    @property
    def is_in_one_chunk(self) -> bool:
        """Whether all of it lies in one file."""
        return len(self.chunks) == 1 and self.chunks[0][0].sizes == self.shape

    def view(self) -> Tensor:
        """All of it, for reading: in the buffer if it is in one chunk, else put together."""
        if self.is_in_one_chunk:
            values = self.chunks[0][1]
            assert values is not None, f"{self.name} is used and was not read"
            return values
        whole = torch.empty(self.shape, dtype=DTYPES[self.dtype], device="cpu")
        self.copy_to(whole)
        return whole

    def copy_to(self, target: Tensor) -> None:
        """Fill a live tensor of the same shape and dtype; of a DTensor, the shard held here."""
        local, box = local_part(target)
        for part, source in self._sources(box):
            copy_bits(_part(local, part), source)

    def _sources(self, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """The parts of ``box``, by their place in it, and the values of each."""
        if not box.num_elements:
            return
        chunks = [(chunk, values) for chunk, values in self.chunks if values is not None]
        holder = next((one for one in chunks if one[0].overlap(box) == box), None)
        if holder is not None or not box.sizes:
            chunk, values = holder or chunks[0]
            yield Box.whole(box.sizes), _part(values, box.within(chunk))
        elif box.is_whole(self.shape):
            yield from chunks
        else:
            yield from self._planned(box, chunks)

    def _planned(
        self, box: Box, chunks: Sequence[tuple[Box, Tensor]]
    ) -> Iterator[tuple[Box, Tensor]]:
        from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        saved = TensorStorageMetadata(
            TensorProperties(dtype=DTYPES[self.dtype]),
            torch.Size(self.shape),
            [_chunk_metadata(chunk) for chunk, _ in chunks],
        )
        for item in create_read_items_for_chunk_list(self.name, saved, [_chunk_metadata(box)]):
            lengths = tuple(item.lengths)
            assert item.storage_index.index is not None
            _, source = chunks[item.storage_index.index]
            there = Box(tuple(item.storage_offsets), lengths)
            yield Box(tuple(item.dest_offsets), lengths), _part(source, there)


class SavedObject:
    """The saved state of one object, as one rank sees it: its JSON, and its tensors by key."""

    def __init__(
        self,
        name: str,
        json: Mapping[str, Json],
        *,
        path: str,
        tensors: Sequence[TensorEntry] = (),
        data: memoryview | None = None,
        counts: Callable[[str], bool] = every_tensor,
    ) -> None:
        """``tensors`` are in the object's own file, of which ``data`` are the bytes, or None if
        it was not read. ``counts(key)``: whether one of them is this rank's to use."""
        self.name = name
        self.json = json
        self.path = path
        self.records: dict[str, SavedTensor] = {}
        self.aliases: dict[str, str] = self.field("aliases", {})
        self._owned: dict[tuple[str, torch.device], Tensor] = {}
        self._not_for_all = {entry.name for entry in tensors if not counts(entry.name)}
        self.add_file(tensors, data, counts=counts)
        for key, described in self.field("sharded_tensors", {}).items():
            self._describe(key, described)

    def add_file(
        self,
        tensors: Sequence[TensorEntry],
        data: memoryview | None,
        *,
        shards: Mapping[str, Json] = MappingProxyType({}),
        counts: Callable[[str], bool] = every_tensor,
    ) -> None:
        """Add the tensors of a file: for each key in ``shards``, the part of the whole that its
        shape and offsets say; any other is whole, and added if ``counts(key)``."""
        buffer = None if data is None else _as_tensor(data)
        for entry in tensors:
            place = shards.get(entry.name)
            if place is None and not counts(entry.name):
                continue
            self._check_entry(entry, buffer)
            values = None if buffer is None else _view(buffer, entry)
            if place is None:
                shape = tuple(entry.shape)
                chunks = [(Box.whole(shape), values)]
                self.records[entry.name] = SavedTensor(entry.name, entry.dtype, shape, chunks)
            else:
                self._add_shard(entry, place, values)

    def _describe(self, key: str, described: Json) -> None:
        try:
            dtype, shape = described
            self.records[key] = SavedTensor(key, str(dtype), sizes_of(shape))
        except (TypeError, ValueError) as error:
            raise self.corrupt(f"shape of {key}", "dtype and sizes", described) from error

    def _add_shard(self, entry: TensorEntry, place: Json, values: Tensor | None) -> None:
        try:
            shape, offsets = map(sizes_of, place)
        except (TypeError, ValueError) as error:
            raise self.corrupt(f"box of {entry.name}", "shape and offsets", place) from error
        box = Box(offsets, tuple(entry.shape))
        if not box.lies_in(shape):
            raise self.corrupt(f"box of {entry.name}", f"a box within {list(shape)}", place)
        fresh = SavedTensor(entry.name, entry.dtype, shape)
        whole = self.records.setdefault(entry.name, fresh)
        if (whole.dtype, whole.shape) != (entry.dtype, shape):
            expected, got = (
                f"{dtype}{list(sizes)}"
                for dtype, sizes in ((whole.dtype, whole.shape), (entry.dtype, shape))
            )
            raise self.corrupt(f"shards of {entry.name}", expected, got)
        whole.chunks.append((box, values))

    def field(self, key: str, default: Json = None) -> Json:
        """A field of the JSON; one without a default must be there."""
        value = self.json.get(key, default)
        if value is None:
            raise self.corrupt("state of the object", f"a field {key!r}", "none")
        return value

    def corrupt(self, check: str, expected: object, got: object) -> CorruptCheckpointError:
        """The error for a checkpoint whose digests are right and whose content makes no sense."""
        return CorruptCheckpointError(
            self.path, check=f"{self.name}: {check}", expected=expected, got=got
        )

    def names(self) -> list[str]:
        """Names of the tensors, tied ones included, without those that other ranks have alone."""
        tied = [name for name in self.aliases if not self.is_of_other_ranks(name)]
        return [*self.records, *tied]

    def is_of_other_ranks(self, name: str) -> bool:
        """True for a tensor that each rank had for itself, and this one had not."""
        key = self.aliases.get(name, name)
        if key in self.records:
            return False
        return key in self._not_for_all or key in self.field("own_tensors", [])

    def record(self, name: str) -> SavedTensor:
        """The tensor called ``name``, through aliases."""
        key = self.aliases.get(name, name)
        if key not in self.records:
            raise self.corrupt("tensors of the file", f"a tensor {key!r}", "none")
        return self.records[key]

    def _check_entry(self, entry: TensorEntry, buffer: Tensor | None) -> None:
        # The manifest may be made up: a view of these bytes must not reach beyond the file.
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            known = ", ".join(DTYPES)
            raise self.corrupt(f"dtype of {entry.name}", f"one of {known}", entry.dtype)
        num_bytes = math.prod(entry.shape) * dtype.itemsize
        if num_bytes != entry.num_bytes:
            raise self.corrupt(f"bytes of {entry.name}", num_bytes, entry.num_bytes)
        if buffer is None:
            return
        if entry.offset % dtype.itemsize or entry.offset + num_bytes > buffer.numel():
            expected = f"aligned and within {buffer.numel()} bytes"
            raise self.corrupt(f"place of {entry.name}", expected, f"offset {entry.offset}")

    def require(self, name: str, live: Tensor | None = None) -> None:
        """Raise StateError unless all that ``live`` needs was read; None needs the whole tensor."""
        record = self.record(name)
        box = Box.whole(record.shape) if live is None else local_part(live)[1]
        if missing := record.missing(box):
            boxes = ", ".join(map(str, missing[:4])) + (", ..." if len(missing) > 4 else "")
            raise StateError(
                f"{self.path}: {self.name}.{record.name}: of its shape {list(record.shape)} this "
                f"directory lacks {boxes}: the shards of other ranks, which are in the directories "
                "of the other nodes. Bring them together, or restore with as many ranks on as "
                "many nodes as before"
            )

    def view(self, name: str) -> Tensor:
        """The whole tensor, in the buffer if it can be: for reading while the plan is applied."""
        return self.record(name).view()

    def copy_to(self, target: Tensor, name: str) -> None:
        """Fill a live tensor of the saved shape and dtype; of a DTensor, the shard held here."""
        self.record(name).copy_to(target)

    def owned(self, name: str, device: str = "cpu") -> Tensor:
        """A copy that outlives the buffer; aliases share one."""
        place = usable_device(device)
        key = (self.aliases.get(name, name), place)
        if key not in self._owned:
            self.require(name)
            record = self.record(name)
            view = record.view()
            if place.type == "cpu" and record.is_in_one_chunk:
                view = view.clone()
            self._owned[key] = view.to(place)
        return self._owned[key]

    def owned_like(self, live: Tensor, name: str) -> Tensor:
        """A copy that is a DTensor where ``live`` is one."""
        record = self.record(name)
        if not is_dtensor(live) or tuple(live.shape) != record.shape:
            return self.owned(name)
        self.require(name, live)
        made: Tensor = empty_like(live, DTYPES[record.dtype])
        record.copy_to(made)
        return made

    def decode(
        self, node: Json, *, on_cpu: bool = False, live: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Any:
        """The value of a tree; its tensors are owned, on the devices they were on or the CPU.

        Those in ``live``, by key, become DTensors again, sharded as they are now.
        """

        def tensor(key: str, device: str) -> Tensor:
            if key in live:
                return self.owned_like(live[key], key)
            return self.owned(key, "cpu" if on_cpu else device)

        try:
            return decode_tree(node, leaf=lambda tag, inner: decode_torch(tag, inner, tensor))
        except ValueError as error:
            raise self.corrupt("state of the object", "JSON of this version", error) from error

    def check(self, node: Json, *, live: Mapping[str, Tensor] = MappingProxyType({})) -> Any:
        """Raise unless a tree can be decoded; its value, with stand-ins for tensors."""

        def tensor(key: str, device: str) -> Tensor:
            self.require(key, live.get(key))
            return torch.empty(0, dtype=DTYPES[self.record(key).dtype], device="cpu")

        try:
            return decode_tree(node, leaf=lambda tag, inner: decode_torch(tag, inner, tensor))
        except ValueError as error:
            raise self.corrupt("state of the object", "JSON of this version", error) from error

    def forget(self) -> None:
        """Drop the references to the buffer, so that its memory can be used again."""
        for record in self.records.values():
            record.chunks.clear()
        self._owned = {}


def local_part(live: Tensor) -> tuple[Tensor, Box]:
    """The local tensor behind a live one, and which box of the whole it is."""
    if is_dtensor(live):
        return local_of(live), shard_of(live, "a live tensor").box
    return live, Box.whole(live.shape)


def copy_bits(target: Tensor, source: Tensor) -> None:
    """Copy values into ``target`` in place, also where ``target`` is expanded (stride 0)."""
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def _as_tensor(data: memoryview) -> Tensor:
    if data.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    writable = bytearray(data) if data.readonly else data  # torch warns of read-only memory
    return torch.frombuffer(writable, dtype=torch.uint8)


def _view(buffer: Tensor, entry: TensorEntry) -> Tensor:
    data = buffer[entry.offset : entry.offset + entry.num_bytes]
    return data.view(DTYPES[entry.dtype]).view(tuple(entry.shape))


def _chunk_metadata(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _part(tensor: Tensor, box: Box) -> Tensor:
    if box.is_whole(tensor.shape):
        return tensor
    for dim, (begin, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor
