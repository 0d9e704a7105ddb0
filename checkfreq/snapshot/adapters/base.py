"""What the adapters share: the saved half of one object, findings, and changes to make.

An adapter knows one kind of object in both directions. ``capture`` reads it without side
effects; ``prepare`` compares it with a saved state and returns the changes that would restore
it, having changed nothing. Changes that run user code come apart from those that only copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from checkfreq.errors import CorruptCheckpointError
from checkfreq.snapshot.codec import decode_tree
from checkfreq.snapshot.sink import Sink
from checkfreq.snapshot.tensors import DTYPES, decode_torch, usable_device
from checkfreq.types import Json


class TensorRecord(Protocol):
    """A tensor of a file: ``TensorSpec`` and the manifest's entries both are one."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def offset(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A verified file in memory: its tensors and the bytes of the whole file.

    ``image`` may be reused once a plan was applied; it must not change before.
    """

    tensors: Sequence[TensorRecord]
    image: memoryview


class Saved:
    """The saved state of one object: its JSON and the tensors of its file."""

    def __init__(
        self, name: str, json: Mapping[str, Json], file: LoadedFile | None, *, path: str
    ) -> None:
        self.name = name
        self.json = json
        self.path = path
        self.records = {record.name: record for record in file.tensors} if file else {}
        self._bytes = _as_tensor(file.image) if file is not None else None
        self.aliases: dict[str, str] = self.field("aliases", {})
        self._owned: dict[tuple[str, torch.device], Tensor] = {}
        for record in self.records.values():
            self._check_record(record)

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

    def record(self, name: str) -> TensorRecord:
        """Record of the tensor called ``name``, through aliases."""
        key = self.aliases.get(name, name)
        if key not in self.records:
            raise self.corrupt("tensors of the file", f"a tensor {key!r}", "none")
        return self.records[key]

    def _check_record(self, record: TensorRecord) -> None:
        dtype = DTYPES.get(record.dtype)
        if dtype is None:
            known = ", ".join(DTYPES)
            raise self.corrupt(f"dtype of {record.name}", f"one of {known}", record.dtype)
        num_bytes = math.prod(record.shape) * dtype.itemsize
        if num_bytes != record.num_bytes:
            raise self.corrupt(f"bytes of {record.name}", num_bytes, record.num_bytes)
        assert self._bytes is not None
        if record.offset % dtype.itemsize or record.offset + num_bytes > self._bytes.numel():
            expected = f"aligned and within {self._bytes.numel()} bytes"
            raise self.corrupt(f"place of {record.name}", expected, f"offset {record.offset}")

    def view(self, name: str) -> Tensor:
        """The tensor as it lies in the buffer: for reading while the plan is applied."""
        record = self.record(name)
        assert self._bytes is not None
        data = self._bytes[record.offset : record.offset + record.num_bytes]
        return data.view(DTYPES[record.dtype]).view(tuple(record.shape))

    def owned(self, name: str, device: str = "cpu") -> Tensor:
        """A copy that outlives the buffer; aliases share one."""
        place = usable_device(device)
        key = (self.aliases.get(name, name), place)
        if key not in self._owned:
            view = self.view(name)
            self._owned[key] = view.clone() if place.type == "cpu" else view.to(place)
        return self._owned[key]

    def decode(self, node: Json, *, on_cpu: bool = False) -> Any:
        """The value of a tree; its tensors are owned, on the devices they were on or the CPU."""

        def tensor(key: str, device: str) -> Tensor:
            return self.owned(key, "cpu" if on_cpu else device)

        try:
            return decode_tree(node, leaf=lambda tag, inner: decode_torch(tag, inner, tensor))
        except ValueError as error:
            raise self.corrupt("state of the object", "JSON of this version", error) from error

    def check(self, node: Json) -> None:
        """Raise unless a tree can be decoded, without copying its tensors."""
        try:
            decode_tree(node, leaf=self._check_leaf)
        except ValueError as error:
            raise self.corrupt("state of the object", "JSON of this version", error) from error

    def _check_leaf(self, tag: str, node: dict[str, Json]) -> object:
        return decode_torch(tag, node, lambda key, device: self._placeholder(key))

    def _placeholder(self, key: str) -> Tensor:
        return torch.empty(0, dtype=DTYPES[self.record(key).dtype], device="cpu")

    def forget(self) -> None:
        """Drop the references to the buffer."""
        self._bytes = None
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


class Adapter(Protocol):
    """One tracked object, by its kind."""

    @property
    def kind(self) -> str:
        """Name of the kind in the manifest."""
        ...

    def capture(self, sink: Sink) -> dict[str, Json]:
        """Add every tensor to ``sink`` and return the rest as JSON; change nothing."""
        ...

    def prepare(self, saved: Saved, findings: Findings) -> Changes:
        """Compare with ``saved``, add to ``findings``, return the changes for what fits."""
        ...


def type_name(value: object) -> str:
    """Qualified name of a value's class, as recorded in manifests and shown in errors."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
