"""What the adapters share: the saved half of one object, findings, and changes to make.

An adapter knows one kind of object in both directions. ``capture`` reads it without side
effects; ``prepare`` compares it with a saved state and returns the changes that would restore
it, having changed nothing. Changes that run user code come apart from those that only copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from checkfreq.errors import CorruptCheckpointError, StateError
from checkfreq.state.codec import decode_tree
from checkfreq.state.collector import StateCollector
from checkfreq.state.dtensors import empty_like, is_dtensor
from checkfreq.state.saved import Piece, SavedTensor, TensorRecord, held
from checkfreq.state.tensors import DTYPES, decode_torch, sizes_of, usable_device
from checkfreq.store.boxes import Box
from checkfreq.types import Json


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A verified file in memory: its tensors and the bytes of the whole file.

    ``image`` may be reused once a plan was applied; it must not change before. None: the file
    is there and was not read, since this rank needs nothing of it.
    """

    tensors: Sequence[TensorRecord]
    image: memoryview | None


@dataclass(frozen=True, slots=True)
class RankFile:
    """What a rank added to an object: by ``boxes`` (key to shape and offsets) parts of tensors.

    The rest of the file is its own: ``is_own(key)`` says of what it counts for who asks.
    """

    file: LoadedFile
    boxes: Mapping[str, Json]
    is_own: Callable[[str], bool]


class Saved:
    """The saved state of one object: its JSON and the tensors of its files."""

    def __init__(
        self,
        name: str,
        json: Mapping[str, Json],
        file: LoadedFile | None,
        *,
        path: str,
        parts: Sequence[RankFile] = (),
        is_for_all: Callable[[str], bool] = lambda key: True,
    ) -> None:
        """``is_for_all(key)``: whether a tensor of ``file`` counts for who asks."""
        self.name = name
        self.json = json
        self.path = path
        self.records: dict[str, SavedTensor] = {}
        self.aliases: dict[str, str] = self.field("aliases", {})
        self._owned: dict[tuple[str, torch.device], Tensor] = {}
        self._not_for_all: set[str] = set()
        if file is not None:
            self._not_for_all = {r.name for r in file.tensors if not is_for_all(r.name)}
            self._take(file, {}, is_own=is_for_all)
        for key, described in self.field("sharded_tensors", {}).items():
            self._describe(key, described)
        for part in parts:
            self._take(part.file, part.boxes, is_own=part.is_own)

    def _take(
        self,
        file: LoadedFile,
        boxes: Mapping[str, Json],
        *,
        is_own: Callable[[str], bool] = lambda key: True,
    ) -> None:
        data = None if file.image is None else _as_tensor(file.image)
        for record in file.tensors:
            box = boxes.get(record.name)
            if box is None and not is_own(record.name):
                continue
            self._check_record(record, data)
            if box is None:
                self._add_whole(record, data)
            else:
                self._add_box(record, box, data)

    def _describe(self, key: str, described: Json) -> None:
        try:
            dtype, shape = described
            self.records[key] = SavedTensor(key, str(dtype), sizes_of(shape), [])
        except (TypeError, ValueError) as error:
            raise self.corrupt(f"shape of {key}", "dtype and sizes", described) from error

    def _add_whole(self, record: TensorRecord, data: Tensor | None) -> None:
        shape = tuple(record.shape)
        piece = Piece(Box.whole(shape), record, data)
        self.records[record.name] = SavedTensor(record.name, record.dtype, shape, [piece])

    def _add_box(self, record: TensorRecord, place: Json, data: Tensor | None) -> None:
        try:
            shape, offsets = map(sizes_of, place)
        except (TypeError, ValueError) as error:
            raise self.corrupt(f"box of {record.name}", "shape and offsets", place) from error
        box = Box(offsets, tuple(record.shape))
        if not box.lies_in(shape):
            raise self.corrupt(f"box of {record.name}", f"a box within {list(shape)}", place)
        fresh = SavedTensor(record.name, record.dtype, shape, [])
        whole = self.records.setdefault(record.name, fresh)
        if (whole.dtype, whole.shape) != (record.dtype, shape):
            expected, got = (
                f"{dtype}{list(sizes)}"
                for dtype, sizes in ((whole.dtype, whole.shape), (record.dtype, shape))
            )
            raise self.corrupt(f"shards of {record.name}", expected, got)
        whole.pieces.append(Piece(box, record, data))

    def field(self, key: str, default: Json = None) -> Json:
        """A field of the JSON; without a default it has to be there."""
        value = self.json.get(key, default)
        if value is None:
            raise self.corrupt("state of the object", f"a field {key!r}", "none")
        return value

    def corrupt(self, check: str, expected: object, got: object) -> CorruptCheckpointError:
        """The error for a checkpoint that validates and still makes no sense."""
        return CorruptCheckpointError(
            self.path, check=f"{self.name}: {check}", expected=expected, got=got
        )

    def names(self) -> list[str]:
        """Names of the tensors, tied ones included, but for what other ranks have of their own."""
        tied = [name for name in self.aliases if not self.is_of_other_ranks(name)]
        return [*self.records, *tied]

    def is_of_other_ranks(self, name: str) -> bool:
        """True for a tensor of which each rank had its own, but not the one that asks."""
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

    def _check_record(self, record: TensorRecord, data: Tensor | None) -> None:
        dtype = DTYPES.get(record.dtype)
        if dtype is None:
            known = ", ".join(DTYPES)
            raise self.corrupt(f"dtype of {record.name}", f"one of {known}", record.dtype)
        num_bytes = math.prod(record.shape) * dtype.itemsize
        if num_bytes != record.num_bytes:
            raise self.corrupt(f"bytes of {record.name}", num_bytes, record.num_bytes)
        if data is None:
            return
        if record.offset % dtype.itemsize or record.offset + num_bytes > data.numel():
            expected = f"aligned and within {data.numel()} bytes"
            raise self.corrupt(f"place of {record.name}", expected, f"offset {record.offset}")

    def require(self, name: str, live: Tensor | None = None) -> None:
        """Raise StateError unless all that ``live`` (None: a whole tensor) needs was read."""
        record = self.record(name)
        box = Box.whole(record.shape) if live is None else held(live)[1]
        if lacking := record.lacks(box):
            boxes = ", ".join(map(str, lacking[:4])) + (", ..." if len(lacking) > 4 else "")
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
        """Fill a live tensor of the saved shape and dtype, or the part of a DTensor held here."""
        self.record(name).copy_to(target)

    def owned(self, name: str, device: str = "cpu") -> Tensor:
        """A copy that outlives the buffer; aliases share one."""
        place = usable_device(device)
        key = (self.aliases.get(name, name), place)
        if key not in self._owned:
            self.require(name)
            record = self.record(name)
            view = record.view()
            if place.type == "cpu" and record.is_in_one_piece:
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

        Those in ``live``, by key, are DTensors again, cut as they are now.
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
        """Drop the references to the buffer."""
        for record in self.records.values():
            record.pieces.clear()
        self._owned = {}


def _as_tensor(image: memoryview) -> Tensor:
    if image.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    writable = bytearray(image) if image.readonly else image  # torch warns of read-only memory
    return torch.frombuffer(writable, dtype=torch.uint8)


@dataclass(slots=True)
class Findings:
    """What comparing saved with live state turned up."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    #: Hyper-parameters set by the script that the checkpoint overrides: "name: old -> new".
    overridden: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def mismatches(self) -> bool:
        """Whether the checkpoint does not fit."""
        return bool(self.missing or self.unexpected or self.different)

    def compare_names(self, prefix: str, saved: Iterable[str], live: Iterable[str]) -> None:
        """List the names that only one side has."""
        there, here = dict.fromkeys(saved), dict.fromkeys(live)
        self.missing += [f"{prefix}.{name}" for name in here if name not in there]
        self.unexpected += [f"{prefix}.{name}" for name in there if name not in here]


@dataclass(frozen=True, slots=True)
class Fallible:
    """A change that runs user code: ``load`` may raise, ``backup()`` returns its undo."""

    name: str
    backup: Callable[[], Callable[[], None]]
    load: Callable[[], None]


@dataclass(slots=True)
class Changes:
    """What would restore one object. ``copies`` only copy and set, and do not raise."""

    fallible: list[Fallible] = field(default_factory=list)
    copies: list[Callable[[], None]] = field(default_factory=list)


#: ``holdings(key, shape)``: the boxes that live objects have of a saved tensor of that shape.
Holdings: TypeAlias = Callable[[str, tuple[int, ...]], Iterable[Box]]


class Adapter(Protocol):
    """One tracked object, by its kind."""

    @property
    def kind(self) -> str:
        """Name of the kind in the manifest."""
        ...

    def capture(self, collector: StateCollector) -> dict[str, Json]:
        """Add every tensor to ``collector`` and return the rest as JSON; change nothing."""
        ...

    def holdings(self) -> Holdings:
        """What the live object needs of each saved tensor; changes nothing."""
        ...

    def prepare(self, saved: Saved, findings: Findings) -> Changes:
        """Compare with ``saved``, add to ``findings``, return the changes for what fits."""
        ...


def all_of_it(key: str, shape: tuple[int, ...]) -> Iterable[Box]:
    """Holdings of an object that has no DTensors."""
    return (Box.whole(shape),)


def type_name(value: object) -> str:
    """Qualified name of a value's class, as recorded in manifests and shown in errors."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
