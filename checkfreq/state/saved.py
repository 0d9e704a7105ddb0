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
from checkfreq.state import composed as compositions
from checkfreq.state.classes import Classes
from checkfreq.state.codec import decode_tree
from checkfreq.state.composed import Record, part_name
from checkfreq.state.dtensors import empty_like, is_dtensor
from checkfreq.state.saved_tensor import Chunk, Placement, Reader, SavedTensor, local_part
from checkfreq.state.tensors import DTYPES, are_strides, decode_torch, sizes_of, usable_device
from checkfreq.store.boxes import Box
from checkfreq.store.manifest import FileEntry, TensorEntry
from checkfreq.types import Json


def every_tensor(key: str) -> bool:
    """A choice of tensors: all of them."""
    return True


def no_tensor(key: str) -> bool:
    """A choice of tensors: none."""
    return False


def new_tensor(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Memory for a tensor, row-major without ``strides``.

    StorageError (ENOMEM) if there can be none: the shape may be made up.
    """
    try:
        if strides is not None:
            return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)
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
        files: Sequence[FileEntry] = (),
        reader: Reader | None = None,
        counts: Callable[[str], bool] = every_tensor,
    ) -> None:
        """``files`` are the object's own. ``counts(key)``: whether a tensor of it is this rank's to
        use. Without a ``reader`` no tensor can be read."""
        self.name = name
        self.json = json
        self.path = path
        self.records: dict[str, SavedTensor] = {}
        self.aliases: dict[str, str] = self.field("aliases", {})
        #: Entries for which the live object's own value stands in ``json`` (``restore(keep=...)``).
        self.kept: frozenset[str] = frozenset()
        self._strides: dict[str, Json] = self.field("strides", {})
        #: What puts composed tensors together, by name.
        self.composed: dict[str, Record] = self.field("composed", {})
        self._parts = {part_name(n, part) for n, r in self.composed.items() for part in r["parts"]}
        #: The classes at hand for objects in the state; None: they are given as plain data.
        self.classes: Classes | None = None
        #: Whether a composed tensor that only a live one can make is given as a dict of its parts.
        self.gives_parts = False
        self._reader = reader
        self._owned: dict[Hashable, Tensor] = {}
        self._coming: dict[Hashable, tuple[SavedTensor, Tensor]] = {}
        self._asked: dict[Hashable, tuple[SavedTensor, Callable[[], Tensor]]] = {}
        self._not_for_all: set[str] = set()
        for file in files:
            self._not_for_all |= {e.name for e in file.tensors if not counts(e.name)}
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
                made = self._tensor(entry.name, entry.dtype, tuple(entry.shape))
                made.chunks.append(Chunk(Box.whole(made.shape), file, entry))
                self.records[entry.name] = made
            else:
                self._add_shard(file, entry, place)

    def _tensor(self, key: str, dtype: str, shape: tuple[int, ...]) -> SavedTensor:
        strides = self._strides.get(key)
        if strides is None:
            return SavedTensor(key, dtype, shape)
        if not are_strides(strides, shape):
            raise self.corrupt(f"strides of {key}", f"those of a tensor {list(shape)}", strides)
        return SavedTensor(key, dtype, shape, strides=tuple(strides))

    def _describe(self, key: str, described: Json) -> None:
        try:
            dtype, shape = described
            self.records[key] = self._tensor(key, str(dtype), sizes_of(shape))
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
        whole = self.records.get(entry.name)
        if whole is None:
            whole = self.records[entry.name] = self._tensor(entry.name, entry.dtype, shape)
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
        found = [*self.records, *tied, *self.composed]
        return [name for name in found if name not in self._parts] if self._parts else found

    def is_of_other_ranks(self, name: str) -> bool:
        """True for a tensor that each rank had for itself, and this one had not."""
        if name in self.composed:
            return any(map(self.is_of_other_ranks, self._parts_of(name).values()))
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

    # ---- tensors that consist of others

    def _parts_of(self, name: str) -> dict[str, str]:
        """The names of the parts of a composed tensor, by what they are to it."""
        return {part: part_name(name, part) for part in self.composed[name]["parts"]}

    def _outline(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        if name in self.composed:
            return None
        record = self.record(name)
        return DTYPES[record.dtype], record.shape

    def misfit(self, name: str, live: Tensor) -> str:
        """Why ``live`` cannot become the composed tensor ``name`` in place; "" if it can."""
        parts = self._parts_of(name)
        outlines = {part: self._outline(key) for part, key in parts.items()}
        why = compositions.misfit(self.composed[name], outlines, live)
        if why:
            return why
        inner = {part: key for part, key in parts.items() if key in self.composed}
        _, theirs = compositions.take_apart(live, name) if inner else ({}, {})
        found = (self.misfit(key, theirs[part]) for part, key in inner.items())
        return next((f"part {why}" for why in found if why), "")

    def check_composed(self, name: str) -> None:
        """Raise CorruptCheckpointError unless a composed tensor makes sense, as far as can be known
        before it is read."""
        try:
            compositions.check(
                self.composed[name], lambda part: self._outline(part_name(name, part))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self.corrupt(f"parts of {name}", "a tensor", error) from error

    def _own_parts(self, name: str, device: str, live: Tensor | None) -> Hashable:
        self.check_composed(name)
        record = self.composed[name]
        is_known = live is not None or self.gives_parts or compositions.can_build(record)
        if not is_known:
            raise StateError(
                f"{self.path}: {self.name}.{name} is {compositions.described(record)}, which can "
                "only be restored into a live tensor of its class: make the object as it was when "
                "the checkpoint was taken (quantise it again, take one step), then restore"
            )
        inner = {} if live is None else compositions.take_apart(live, name)[1]
        for part, key in self._parts_of(name).items():
            self.own(key, device, live=inner.get(part) if key in self.composed else None)
        return name, usable_device(device)

    def _put_together(self, name: str, device: str, live: Tensor | None) -> Any:
        key = self._own_parts(name, device, live)
        if key not in self._owned:
            inner = {} if live is None else compositions.take_apart(live, name)[1]
            parts = {
                part: self.owned(n, device, live=inner.get(part) if n in self.composed else None)
                for part, n in self._parts_of(name).items()
            }
            record = self.composed[name]
            if live is None and not compositions.can_build(record):
                return parts
            try:
                self._owned[key] = compositions.build(record, parts, live=live)
            except ValueError as error:
                raise self.corrupt(f"parts of {name}", "a tensor", error) from error
        return self._owned[key]

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
        if name in self.composed:
            self.check_composed(name)
            for part in self._parts_of(name).values():
                self.require(part)
            return
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
        if name in self.composed:
            return self._own_parts(name, device, live)
        record = self.record(name)
        if live is not None and is_dtensor(live) and tuple(live.shape) == record.shape:
            key: Hashable = record.name, live.device_mesh, live.placements  # type: ignore[attr-defined]
            make = partial(empty_like, live, DTYPES[record.dtype], record.strides)
            self.require(name, live)
        else:
            place = usable_device(device)
            key = record.name, place
            make = partial(new_tensor, record.shape, DTYPES[record.dtype], place, record.strides)
            self.require(name)
        if key not in self._owned:
            self._asked.setdefault(key, (record, make))
        return key

    def owned(self, name: str, device: str = "cpu", *, live: Tensor | None = None) -> Tensor:
        """A tensor with memory of its own; a DTensor split as ``live`` is, if that is one.

        Aliases share one. It is read now if ``own`` and ``fetch`` did not see to it before.
        """
        if name in self.composed:
            found: Tensor = self._put_together(name, device, live)
            return found
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
        if key in self.composed:
            self.check_composed(key)
            return torch.empty(0, device="cpu")
        return torch.empty(0, dtype=DTYPES[self.record(key).dtype], device="cpu")

    def _decode(self, node: Json, tensor: Callable[[str, str], Tensor]) -> Any:
        try:
            return decode_tree(
                node,
                leaf=lambda tag, inner: decode_torch(tag, inner, tensor),
                classes=self.classes,
            )
        except ValueError as error:
            raise self.corrupt("state of the object", "JSON of this version", error) from error

    def forget(self) -> None:
        """Drop what was read, so that its memory can be used again."""
        self._owned, self._coming, self._asked = {}, {}, {}
