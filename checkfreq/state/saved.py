"""The saved state of one object, and its tensors: in one file, or in shards from many ranks' files.

A tensor is read when it is asked for, through a ``Reader`` that verifies it. What user code will
be given has memory of its own (``own``), so that all of it is read at once before anything live
changes; live tensors are filled in place, from ``SavedTensor.placements``.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from checkfreq.errors import CorruptCheckpointError, StateError, StorageError
from checkfreq.state.codec import decode_tree
from checkfreq.state.dtensors import empty_like, is_dtensor
from checkfreq.state.saved_tensor import Chunk, Placement, Reader, SavedTensor, local_part
from checkfreq.state.tensors import DTYPES, decode_torch, sizes_of, usable_device
from checkfreq.store.boxes import Box
from checkfreq.store.manifest import FileEntry, TensorEntry
from checkfreq.types import Json


def every_tensor(key: str) -> bool:
    """A choice of tensors: all of them."""
    return True


def no_tensor(key: str) -> bool:
    """A choice of tensors: none."""
    return False


def new_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a tensor; StorageError (ENOMEM) if there can be none: the shape may be made up."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    except RuntimeError as error:
        text = f"no memory for a tensor {list(shape)} of {dtype}: {str(error).splitlines()[0]}"
        raise StorageError(errno.ENOMEM, text) from None


class SavedObject:
    """The saved state of one object, as one rank sees it: its JSON, and its tensors by key."""

    def __init__(
        self,
        name: str,
        json: Mapping[str, Json],
        *,
        path: str,
        file: FileEntry | None = None,
        reader: Reader | None = None,
        counts: Callable[[str], bool] = every_tensor,
    ) -> None:
        """``file`` is the object's own. ``counts(key)``: whether a tensor of it is this rank's to
        use. Without a ``reader`` no tensor can be read."""
        self.name = name
        self.json = json
        self.path = path
        self.records: dict[str, SavedTensor] = {}
        self.aliases: dict[str, str] = self.field("aliases", {})
        self._reader = reader
        self._owned: dict[Hashable, Tensor] = {}
        self._coming: dict[Hashable, tuple[SavedTensor, Tensor]] = {}
        self._asked: dict[Hashable, tuple[SavedTensor, Callable[[], Tensor]]] = {}
        self._not_for_all: set[str] = set()
        if file is not None:
            self._not_for_all = {e.name for e in file.tensors if not counts(e.name)}
            self.add_file(file, counts=counts)
        for key, described in self.field("sharded_tensors", {}).items():
            self._describe(key, described)

    def add_file(
        self,
        file: FileEntry,
        *,
        shards: Mapping[str, Json] = MappingProxyType({}),
        counts: Callable[[str], bool] = every_tensor,
    ) -> None:
        """Add the tensors of a file: for each key in ``shards``, the part of the whole that its
        shape and offsets say; any other is whole, and added if ``counts(key)``."""
        for entry in file.tensors:
            place = shards.get(entry.name)
            if place is None and not counts(entry.name):
                continue
            self._check_entry(entry, file)
            if place is None:
                shape = tuple(entry.shape)
                chunk = Chunk(Box.whole(shape), file, entry)
                self.records[entry.name] = SavedTensor(entry.name, entry.dtype, shape, [chunk])
            else:
                self._add_shard(file, entry, place)

    def _describe(self, key: str, described: Json) -> None:
        try:
            dtype, shape = described
            self.records[key] = SavedTensor(key, str(dtype), sizes_of(shape))
        except (TypeError, ValueError) as error:
            raise self.corrupt(f"shape of {key}", "dtype and sizes", described) from error

    def _add_shard(self, file: FileEntry, entry: TensorEntry, place: Json) -> None:
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
        whole.chunks.append(Chunk(box, file, entry))

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

    def _check_entry(self, entry: TensorEntry, file: FileEntry) -> None:
        # The manifest may be made up: what is read must not reach beyond the file.
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            known = ", ".join(DTYPES)
            raise self.corrupt(f"dtype of {entry.name}", f"one of {known}", entry.dtype)
        num_bytes = math.prod(entry.shape) * dtype.itemsize
        if num_bytes != entry.num_bytes:
            raise self.corrupt(f"bytes of {entry.name}", num_bytes, entry.num_bytes)
        if entry.offset % dtype.itemsize or entry.offset + num_bytes > file.num_bytes:
            expected = f"aligned and within {file.num_bytes} bytes"
            raise self.corrupt(f"place of {entry.name}", expected, f"offset {entry.offset}")

    def require(self, name: str, live: Tensor | None = None) -> None:
        """Raise StateError unless all that ``live`` needs is here; None needs the whole tensor."""
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

    # ---- tensors with memory of their own

    def own(self, name: str, device: str = "cpu", *, live: Tensor | None = None) -> Hashable:
        """Say that ``owned`` will be called with these arguments; returns the key of the tensor.

        Raises StateError if parts of it are not here.
        """
        record = self.record(name)
        if live is not None and is_dtensor(live) and tuple(live.shape) == record.shape:
            key: Hashable = record.name, live.device_mesh, live.placements  # type: ignore[attr-defined]
            make = partial(empty_like, live, DTYPES[record.dtype])
            self.require(name, live)
        else:
            place = usable_device(device)
            key = record.name, place
            make = partial(new_tensor, record.shape, DTYPES[record.dtype], place)
            self.require(name)
        if key not in self._owned:
            self._asked.setdefault(key, (record, make))
        return key

    def owned(self, name: str, device: str = "cpu", *, live: Tensor | None = None) -> Tensor:
        """A tensor with memory of its own; a DTensor split as ``live`` is, if that is one.

        Aliases share one. It is read now if ``own`` and ``fetch`` did not see to it before.
        """
        key = self.own(name, device, live=live)
        if key not in self._owned:
            self.fetch()
        return self._owned[key]

    def fill(self, target: Tensor, name: str) -> None:
        """Have ``target``, which is not live yet, filled by the next ``fetch``."""
        record = self.record(name)
        self._asked[object()] = record, lambda: target

    @property
    def asked_bytes(self) -> int:
        """Memory that the tensors take that were asked for and are not here yet, at most."""
        return sum(record.num_bytes for record, _ in self._asked.values())

    def fetch(self) -> None:
        """Read every tensor that was asked for."""
        self.read(self.placements())
        self.arrived()

    def placements(self) -> list[Placement]:
        """Allocate what was asked for, and say what fills it. ``arrived`` follows the read."""
        self._coming = {key: (record, make()) for key, (record, make) in self._asked.items()}
        return [one for record, made in self._coming.values() for one in record.placements(made)]

    def arrived(self) -> None:
        """What ``placements`` said has been read."""
        self._owned.update((key, made) for key, (_, made) in self._coming.items())
        self._coming, self._asked = {}, {}

    def read(self, placements: Sequence[Placement]) -> None:
        """See ``Reader``."""
        if placements:
            assert self._reader is not None, f"{self.name}: nothing can be read"
            self._reader.read(placements)

    # ---- trees

    def decode(
        self, node: Json, *, on_cpu: bool = False, live: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Any:
        """The value of a tree; its tensors are owned, on the devices they were on or the CPU.

        Those in ``live``, by key, become DTensors again, sharded as they are now.
        """

        def tensor(key: str, device: str) -> Tensor:
            return self.owned(key, "cpu" if on_cpu else device, live=live.get(key))

        return self._decode(node, tensor)

    def own_tree(
        self, node: Json, *, on_cpu: bool = False, live: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Any:
        """Say that ``decode`` will be called with these arguments; see ``check``."""

        def tensor(key: str, device: str) -> Tensor:
            self.own(key, "cpu" if on_cpu else device, live=live.get(key))
            return self.stand_in(key)

        return self._decode(node, tensor)

    def check(self, node: Json, *, live: Mapping[str, Tensor] = MappingProxyType({})) -> Any:
        """Raise unless a tree can be decoded; its value, with stand-ins for tensors."""

        def tensor(key: str, device: str) -> Tensor:
            self.require(key, live.get(key))
            return self.stand_in(key)

        return self._decode(node, tensor)

    def stand_in(self, key: str) -> Tensor:
        """An empty tensor of the dtype of ``key``; a new one each time."""
        return torch.empty(0, dtype=DTYPES[self.record(key).dtype], device="cpu")

    def _decode(self, node: Json, tensor: Callable[[str, str], Tensor]) -> Any:
        try:
            return decode_tree(node, leaf=lambda tag, inner: decode_torch(tag, inner, tensor))
        except ValueError as error:
            raise self.corrupt("state of the object", "JSON of this version", error) from error

    def forget(self) -> None:
        """Drop what was read, so that its memory can be used again."""
        self._owned, self._coming, self._asked = {}, {}, {}
