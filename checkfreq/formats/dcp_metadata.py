"""The ``.metadata`` of a DCP folder: a pickle from a stranger, read without any class or function.

The machine below is Python's own, but what it makes of a global is a `Record`, which has no
methods and is no class: nothing in the pickle can be called, imported or changed. DCP's objects are
then built here, from the values of those fields that a reader needs, each of which is checked.

It is Python's machine in Python because the one in C takes memory for any number that the pickle
names as a place for a value.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from checkfreq.state.codec import MAX_DEPTH
from checkfreq.state.tensors import DTYPE_NAMES, sizes_of
from checkfreq.store.boxes import Box
from checkfreq.store.checks import LARGEST, is_count
from checkfreq.store.cover import Placed, fault_of

_DCP = "torch.distributed.checkpoint"
_OF_METADATA = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
_KNOWN = {
    *(f"{_DCP}.metadata.{name}" for name in _OF_METADATA),
    *(f"{_DCP}.filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout"),
    *(f"torch.{name}" for name, one in vars(torch).items() if isinstance(one, torch.dtype)),
    *(
        f"{module}.{name}"
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "Path", "PurePath")
    ),
    "collections.OrderedDict",
}
#: torch makes no tensor with more.
_MOST_DIMENSIONS = 64
#: A part goes through one or two, such as a compression; many parts may share one list.
_MOST_TRANSFORMS = 16


def metadata_of(data: bytes) -> Metadata:
    """DCP's metadata, of which nothing leads out of the folder, and each tensor has all its parts.

    Raises pickle.UnpicklingError for what needs more than DCP's own classes, and TypeError,
    ValueError and the like for what makes no sense.
    """
    fields = _fields(_Machine(io.BytesIO(data)).load(), "Metadata")
    places = _pairs(fields["storage_data"], "the places of the parts")
    storage = {_index(key): _place(value) for key, value in places.items()}
    entries = _pairs(fields["state_dict_metadata"], "the entries")
    # Before they are looked at: one list may stand in for many.
    if sum(map(_num_parts, entries.values())) > len(storage):
        raise ValueError("expected a place for each part of a tensor")
    state = {_text(name): _entry(name, one) for name, one in entries.items()}
    for name, one in state.items():
        _require_bytes(name, one, storage)
    paths = fields.get("planner_data")
    return Metadata(
        state_dict_metadata=state,
        planner_data=dict(map(_path, paths.items())) if isinstance(paths, dict) else {},
        storage_data=storage,
        storage_meta=StorageMeta(),
    )


@dataclass(slots=True, eq=False)
class Record:
    """What stands for an object: the name of what would make it, what of, and its state."""

    made_by: str
    args: object = None
    state: object = None


class _Machine(pickle._Unpickler):
    """Makes records, and plain values."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)
    # DCP writes none of these. The first takes as much memory as the pickle says; the others hash
    # what they are given, which never ends for tuples within tuples.
    for _unwanted in ("BYTEARRAY8", "DICT", "FROZENSET", "ADDITEMS"):
        del dispatch[getattr(pickle, _unwanted)[0]]

    def find_class(self, module: str, name: str) -> Record:
        """See pickle.Unpickler; UnpicklingError for anything that DCP does not write."""
        if (known := f"{module}.{name}") not in _KNOWN:
            raise pickle.UnpicklingError(f"GLOBAL {known} is none of DCP's classes")
        return Record(known)

    def _make(self) -> None:
        args, made_by = self.stack.pop(), self.stack[-1]
        if type(made_by) is not Record or made_by.args is not None:
            raise pickle.UnpicklingError("expected one of DCP's classes to make an object of")
        is_dict = made_by.made_by == "collections.OrderedDict"
        self.stack[-1] = {} if is_dict else Record(made_by.made_by, args)

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not Record or made.args is None or made.state is not None:
            raise pickle.UnpicklingError("expected an object of DCP's to give a state to")
        made.state = state

    def _set(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def _set_all(self) -> None:
        self._fill(self.pop_mark())

    def _fill(self, items: list[Any]) -> None:
        keys, made = items[::2], self.stack[-1]
        if type(made) is not dict or not all(type(key) in (str, Record) for key in keys):
            raise pickle.UnpicklingError("expected a dict with names as keys")
        made.update(zip(keys, items[1::2], strict=True))

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _make
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.SETITEM[0]], dispatch[pickle.SETITEMS[0]] = _set, _set_all


def _fields(value: object, kind: str) -> Mapping[str, Any]:
    name = f"{_DCP}.{'filesystem' if kind == '_StorageInfo' else 'metadata'}.{kind}"
    if type(value) is not Record or value.made_by != name or type(value.state) is not dict:
        raise TypeError(f"expected a {kind}, got a {type(value).__name__}")
    return value.state


def _pairs(value: object, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise TypeError(f"expected {what}, got a {type(value).__name__}")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"expected a name, got a {type(value).__name__}")
    value.encode()  # no lone surrogates
    return value


def _sizes(value: object) -> torch.Size:
    if type(value) is Record and value.made_by == "torch.Size" and type(value.args) is tuple:
        (value,) = value.args
    if not isinstance(value, tuple | list) or len(value) > _MOST_DIMENSIONS:
        raise TypeError(f"expected sizes, got a {type(value).__name__}")
    return torch.Size(sizes_of(list(value)))


def _index(value: object) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]),
        None if offset is None else _sizes(offset),
        index if is_count(index) else None,
    )


def _place(value: object) -> _StorageInfo:
    fields = _fields(value, "_StorageInfo")
    offset, length = fields["offset"], fields["length"]
    # Only texts are quoted in errors: the repr() of lists within lists may never end.
    if "/" in (file := _text(fields["relative_path"])) or file in ("", ".", ".."):
        raise ValueError(f"expected names of files in the folder, got {file!r:.80}")
    if not is_count(offset) or not is_count(length):
        raise ValueError(f"expected a place in {file!r:.80}")
    how = fields.get("transform_descriptors")
    if how is not None and (type(how) is not list or len(how) > _MOST_TRANSFORMS):
        raise ValueError(f"expected at most {_MOST_TRANSFORMS} transforms of {file!r:.80}")
    return _StorageInfo(file, offset, length, how and [_text(one) for one in how])


def _num_parts(entry: object) -> int:
    state = entry.state if type(entry) is Record else None
    chunks = state.get("chunks") if type(state) is dict else None
    return len(chunks) if type(chunks) is list else 0


def _entry(name: object, value: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(value) is Record and value.made_by == f"{_DCP}.metadata.BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(value, "TensorStorageMetadata")
    shape = _sizes(fields["size"])
    chunks = [
        ChunkStorageMetadata(_sizes(one["offsets"]), _sizes(one["sizes"]))
        for one in (_fields(one, "ChunkStorageMetadata") for one in fields["chunks"])
    ]
    boxes = [Placed(0, Box(tuple(one.offsets), tuple(one.sizes))) for one in chunks]
    if fault_of(tuple(shape), boxes):
        raise ValueError(f"{name!r:.80}: expected each element in one part")
    dtype = _dtype(fields["properties"])
    return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)


def _require_bytes(
    name: str,
    entry: TensorStorageMetadata | BytesStorageMetadata,
    storage: Mapping[MetadataIndex, _StorageInfo],
) -> None:
    """KeyError or ValueError unless each part of a tensor has a place with as many bytes."""
    if isinstance(entry, BytesStorageMetadata):
        return
    for part in entry.chunks:
        place = storage[MetadataIndex(name, part.offsets)]
        num_bytes = math.prod(part.sizes) * entry.properties.dtype.itemsize
        if place.length < num_bytes and not place.transform_descriptors:
            raise ValueError(f"{name!r:.80}: expected {num_bytes} bytes, found {place.length}")


def _dtype(properties: object) -> torch.dtype:
    """The first of the values that TensorProperties.__getstate__ returns."""
    state = properties.state if type(properties) is Record else None
    dtype = state[0] if type(state) is tuple and state else None
    found = vars(torch).get(dtype.made_by.removeprefix("torch.")) if type(dtype) is Record else None
    if not isinstance(found, torch.dtype) or found not in DTYPE_NAMES:
        raise TypeError(f"expected a dtype, got a {type(properties).__name__}")
    return found


def _path(item: tuple[object, object]) -> tuple[str, tuple[str | int, ...]]:
    name, keys = item
    if type(keys) is not tuple or not 0 < len(keys) <= MAX_DEPTH:
        raise TypeError("expected the keys that lead to a value")
    for key in keys:
        if type(key) is not int or abs(key) > LARGEST:
            _text(key)
    return _text(name), keys
