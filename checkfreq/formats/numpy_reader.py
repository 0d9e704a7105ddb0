"""Reads a checkpoint directory with NumPy and the standard library alone.

::

    checkpoint = open_checkpoint("chk/")             # the newest step; or step=1200
    model = checkpoint.tensors("model")              # {"0.weight": array, ...}, shards put together
    optimizer = checkpoint.value("optimizer")        # the JSON of an object, tensors filled in

This file needs nothing else of checkfreq and may be copied out of it. Digests are verified if
``xxhash`` can be imported (``verifies`` says whether). Arrays of dtypes that NumPy does not have
(bfloat16, float8, complex32) are their bits as unsigned integers of the same size; ``dtype_of`` has
the name. Nothing is imported, called or unpickled that a checkpoint names.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

try:
    from xxhash import xxh3_64_hexdigest

    verifies = True
except ImportError:
    verifies = False

#: torch's dtypes by the NumPy dtype of an array; what NumPy lacks is unsigned integers.
DTYPES = {
    **{name: name for name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32")},
    **{name: name for name in ("uint64", "int64", "float16", "float32", "float64")},
    **{"complex64": "complex64", "complex128": "complex128"},
    **{"bfloat16": "uint16", "complex32": "uint32"},
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"), "uint8"),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), "uint8"),
}
_STEP = re.compile(r"step-([0-9]{8,18})")
_FRAME = re.compile(rb'\{"format_version": ([0-9]{1,9}), "digest": "([0-9a-f]{16})",\n')
_OF_A_RANK = re.compile(r"(?:.*\.rank-|part-)([0-9]{5,9})\.[a-z]+")
_NEWEST_FORMAT = 4
#: Many ranks' files lie in folders of so many ranks.
RANKS_A_FOLDER = 64
#: What reading a record raises that is not as docs/format.md has it.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError)
_Read = TypeVar("_Read", bound=Callable[..., Any])


class _NoTensorError(KeyError):
    pass


def _guarded(read: _Read) -> _Read:
    """``read``, with ValueError in place of what a damaged or forged record makes it raise."""

    @functools.wraps(read)
    def guarded(self: Checkpoint, *args: Any, **named: Any) -> Any:
        try:
            return read(self, *args, **named)
        except _NoTensorError:
            raise
        except (*_DAMAGE, struct.error) as error:
            raise ValueError(
                f"{self._place}: expected the record of a checkpoint, found one that is damaged: "
                f"{type(error).__name__}: {error}"
            ) from error

    return guarded  # type: ignore[return-value]


class Layout(NamedTuple):
    """A tensor, unread. ``digests``: of each of its parts, with its place; equal ones have equal
    bytes. ``rank``: whose own it is; None if it is of all ranks.
    """

    dtype: str
    shape: tuple[int, ...]
    digests: tuple[tuple[Any, ...], ...]
    rank: int | None


class _Part(NamedTuple):
    """Where a tensor is, or a shard of one (the shape of the whole, and offsets)."""

    file: dict[str, Any]
    entry: dict[str, Any]
    shard: Any
    rank: int | None


def steps(directory: str | Path) -> list[int]:
    """The steps in a checkpoint directory, ascending."""
    root = Path(directory)
    found = {
        int(match[1])
        for path in root.iterdir()
        if (match := _STEP.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    }
    return sorted(step for step in found if not (root / f".gone-{step}").exists())


def open_checkpoint(directory: str | Path, step: int | None = None) -> Checkpoint:
    """A step of a checkpoint directory, by default the newest; or one ``step-...`` directory.

    Raises ValueError for a damaged record, FileNotFoundError if there is no such step.
    """
    folder = Path(directory)
    if not (folder / "manifest.json").exists():
        there = steps(folder)
        if not there or (step is not None and step not in there):
            raise FileNotFoundError(f"{folder}: expected step {step or 'any'}, found {there}")
        folder = folder / f"step-{there[-1] if step is None else step:08d}"
    return Checkpoint(folder)


class Checkpoint:
    """One checkpoint: its record (``manifest``), and its tensors as arrays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._take(_contents(folder / "manifest.json"), str(folder))

    @_guarded
    def _take(self, record: bytes, place: str) -> None:
        """``place``: where it is, for messages."""
        self._place = place
        self.manifest: dict[str, Any] = _record(record, f"{place}/manifest.json")
        if "parts" in self.manifest:
            self.manifest = self._joined_records(self.manifest)
        self._files = {file["name"]: file for file in self.manifest["files"]}
        self._headers: set[str] = set()

    def _joined_records(self, root: dict[str, Any]) -> dict[str, Any]:
        """The root of many ranks' records with all of them in it, as of fewer ranks they are."""
        files: list[Any] = []
        ranks: dict[str, Any] = {}
        for rank, _, digest, _ in sorted(root["parts"], key=lambda row: row[0] != root["leader"]):
            path = _located(self.folder, f"part-{rank:05d}.json")
            part = _record(_contents(path), f"{self._place}/{path.name}")
            if part["digest"] != digest:
                raise ValueError(f"{path}: expected digest {digest}, found {part['digest']}")
            files += part["record"]["files"]
            ranks |= part["record"]["ranks"]
        return {**root, "files": files, "ranks": ranks}

    @property
    @_guarded
    def step(self) -> int:
        """The step it was taken at."""
        step: int = self.manifest["step"]
        return step

    @property
    @_guarded
    def names(self) -> list[str]:
        """The tracked objects, "rng" and "$positions" among them."""
        own = (name for objects in self._ranks().values() for name in objects)
        return list(dict.fromkeys([*self.manifest["objects"], *own]))

    @property
    @_guarded
    def ranks(self) -> list[int]:
        """The ranks that have anything of their own here; none if there was one rank."""
        return sorted(self._ranks())

    @_guarded
    def object(self, name: str, rank: int = 0) -> dict[str, Any]:
        """The JSON of an object, as ``rank`` had it."""
        own = self._ranks().get(rank, {}).get(name, {})
        found: dict[str, Any] = own if "kind" in own else self.manifest["objects"].get(name, own)
        return found

    @_guarded
    def dtype_of(self, name: str, key: str) -> str:
        """torch's name of a tensor's dtype: ``bfloat16``."""
        key = self._aliases(name).get(key, key)
        for _, _, entry in self._entries(name):
            if entry["name"] == key:
                dtype: str = entry["dtype"]
                return dtype
        raise _NoTensorError(f"{name} has no tensor {key!r}")

    @_guarded
    def tensors(self, name: str, rank: int = 0) -> dict[str, np.ndarray]:
        """The tensors of an object by key, tied ones under each of their names.

        Shards are put together; what each rank had for itself is as ``rank`` had it. Raises
        ValueError for bytes that do not match their digest, and for shards that are not here.
        """
        found = {key: self._joined(name, key, held) for key, held in self._held(name, rank).items()}
        aliases = self._aliases(name)
        found.update({tied: found[key] for tied, key in aliases.items() if key in found})
        return found

    @_guarded
    def tensor(self, name: str, key: str, rank: int = 0) -> np.ndarray:
        """One of `tensors`, without reading the others."""
        key, held = self._aliases(name).get(key, key), self._held(name, rank)
        if key not in held:
            raise _NoTensorError(f"{name} has no tensor {key!r}")
        return self._joined(name, key, held[key])

    @_guarded
    def layouts(self, name: str, rank: int = 0) -> dict[str, Layout]:
        """What `tensors` would read, without tied names: nothing is read for it."""
        return {key: _layout(held) for key, held in self._held(name, rank).items()}

    @_guarded
    def value(self, name: str, rank: int = 0) -> Any:
        """The JSON of an object with its values decoded, and arrays in place of tensors."""
        return _decode(self.object(name, rank), self.tensors(name, rank))

    @_guarded
    def verify(self) -> None:
        """Read everything; ValueError for the first byte that is not what was written."""
        if not verifies:
            raise ImportError("verify() needs xxhash: pip install xxhash")
        for file in self.manifest["files"]:
            for entry in file["tensors"]:
                self._read(file, entry)

    def _ranks(self) -> dict[int, dict[str, Any]]:
        return {int(number): own for number, own in self.manifest.get("ranks", {}).items()}

    def _aliases(self, name: str) -> dict[str, str]:
        objects = [self.manifest["objects"].get(name, {})]
        objects += [own.get(name, {}) for own in self._ranks().values()]
        return {k: v for json_ in objects for k, v in json_.get("aliases", {}).items()}

    def _shards(self, rank: int, name: str) -> dict[str, Any]:
        shards: dict[str, Any] = self._ranks()[rank].get(name, {}).get("shards", {})
        return shards

    def _entries(self, name: str) -> Iterator[tuple[int | None, dict[str, Any], dict[str, Any]]]:
        """(rank, or None for all; file; tensor) of each tensor of an object."""
        ranks = [None, *sorted(self._ranks())]
        for rank in ranks:
            for suffix in ("", ".frozen", ".buffers") if rank is None else (f".rank-{rank:05d}",):
                file = self._files.get(f"{name}{suffix}.safetensors")
                if file is not None:
                    yield from ((rank, file, entry) for entry in file["tensors"])

    def _held(self, name: str, rank: int) -> dict[str, list[_Part]]:
        """By key, the parts of each tensor of an object: one, or its shards."""
        found: dict[str, list[_Part]] = {}
        for number, file, entry in self._entries(name):
            key = entry["name"]
            shard = None if number is None else self._shards(number, name).get(key)
            if shard is not None or number is None or number == rank:
                found.setdefault(key, []).append(_Part(file, entry, shard, number))
        return found

    def _joined(self, name: str, key: str, held: list[_Part]) -> np.ndarray:
        if held[-1].shard is None:
            return self._read(held[-1].file, held[-1].entry)
        held = [part for part in held if part.shard is not None]
        shape = tuple(held[0].shard[0])
        covered = sum(math.prod(part.entry["shape"]) for part in held)
        if covered != math.prod(shape):
            raise ValueError(
                f"{self._place}: {name}.{key}: expected {math.prod(shape)} elements, found "
                f"{covered}: other directories have the other ranks' shards"
            )
        whole = np.zeros(shape, DTYPES[held[0].entry["dtype"]])
        for part in held:
            box = zip(part.shard[1], part.entry["shape"], strict=True)
            whole[tuple(slice(at, at + size) for at, size in box)] = self._read(*part[:2])
        return whole

    def _read(self, file: dict[str, Any], entry: dict[str, Any]) -> np.ndarray:
        place = f"{self._place}/{file['name']}"
        if file["name"] not in self._headers:
            header = self._bytes(file, 0, file["header_bytes"])
            _check(header, file["header_digest"], f"{place}: header")
            self._headers.add(file["name"])
        data = self._bytes(file, entry["offset"], entry["num_bytes"])
        size = entry.get("piece_bytes") or max(len(data), 1)
        digests = [entry["digest"][at : at + 16] for at in range(0, len(entry["digest"]), 16)]
        view = memoryview(data)
        for number, digest in enumerate(digests):
            piece = view[number * size : (number + 1) * size]
            _check(piece, digest, f"{place}: tensor {entry['name']}")
        dtype = np.dtype(DTYPES[entry["dtype"]]).newbyteorder("<")
        if len(data) != math.prod(entry["shape"]) * dtype.itemsize:
            raise ValueError(f"{place}: tensor {entry['name']}: its bytes do not fit its shape")
        array = np.frombuffer(data, dtype).reshape(entry["shape"])
        return array.copy()  # writable

    def _bytes(self, file: dict[str, Any], start: int, count: int) -> bytes | bytearray:
        """Bytes of a payload file."""
        path = _located(self.folder, file["name"])
        if Path(file["name"]).name != file["name"] or path.is_symlink() or not path.is_file():
            raise ValueError(f"{path}: expected a regular file in the folder")
        if path.stat().st_size != file["num_bytes"]:
            raise ValueError(
                f"{path}: expected {file['num_bytes']} bytes, found {path.stat().st_size}"
            )
        if not 0 <= start <= start + count <= file["num_bytes"]:
            raise ValueError(f"{path}: expected bytes of it, found {count} from {start} on")
        with path.open("rb") as stream:
            stream.seek(start)
            data: bytes = stream.read(count)
            return data


def _contents(path: Path) -> bytes:
    """The bytes of a file. A FIFO, which would be waited for, is refused."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a regular file")
    return path.read_bytes()


def _located(folder: Path, name: str) -> Path:
    """Where a file of a checkpoint is."""
    match = _OF_A_RANK.fullmatch(name)
    first = int(match[1]) // RANKS_A_FOLDER * RANKS_A_FOLDER if match else 0
    if not first or (folder / name).exists():
        return folder / name
    inner = folder / f"ranks-{first:05d}"
    if inner.is_symlink():
        raise ValueError(f"{inner}: expected a folder, found a symbolic link")
    return inner / name


def _layout(held: list[_Part]) -> Layout:
    part = held[-1]
    if part.shard is None:
        entry = part.entry
        digests: tuple[Any, ...] = ((entry.get("piece_bytes"), entry["digest"]),)
        return Layout(entry["dtype"], tuple(entry["shape"]), digests, part.rank)
    digests = tuple(
        (*one.shard[1], *one.entry["shape"], one.entry.get("piece_bytes"), one.entry["digest"])
        for one in held
        if one.shard is not None
    )
    return Layout(part.entry["dtype"], tuple(part.shard[0]), digests, None)


def _record(data: bytes, path: str) -> dict[str, Any]:
    frame = _FRAME.match(data)
    if frame is None:
        raise ValueError(f"{path}: expected a manifest, found something else")
    blank = b"".join([data[: frame.start(2)], b"0" * 16, data[frame.end(2) :]])
    _check(blank, frame[2].decode(), f"{path}: own digest")
    if int(frame[1]) > _NEWEST_FORMAT:
        raise ValueError(
            f"{path}: format version {int(frame[1])}: this reads up to {_NEWEST_FORMAT}"
        )
    found: dict[str, Any] = json.loads(data)
    return found


def _check(data: bytes | bytearray | memoryview, expected: str, what: str) -> None:
    if verifies and (got := xxh3_64_hexdigest(data)) != expected:
        raise ValueError(f"{what}: expected digest {expected}, found {got}")


def _decode(node: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The value of a tree; see docs/format.md. Unknown tags stay as they are."""
    if isinstance(node, list):
        return [_decode(item, arrays) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next(iter(node), "")
    if tag in ("$tensor", "$ndarray"):
        return arrays[node[tag]]
    if tag in ("$dict", "$OrderedDict", "$Counter", "$defaultdict"):
        return {_key(_decode(k, arrays)): _decode(v, arrays) for k, v in node[tag]}
    if tag in ("$tuple", "$deque", "$set", "$frozenset", "$slice"):
        items = _decode(node[tag], arrays)
        return tuple(items) if tag in ("$tuple", "$slice") else items
    if tag == "$object":  # a named tuple, or an object that is its attributes: these by name
        return _decode(node["fields"], arrays)
    if tag in _SCALARS:
        return _SCALARS[tag](node)
    return {key: _decode(value, arrays) for key, value in node.items()}


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def _float(text: str) -> float:
    if text in ("inf", "-inf"):
        return float(text)
    value: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return value


_SCALARS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "$int": lambda node: int(node["$int"], 16),
    "$float": lambda node: _float(node["$float"]),
    "$packed": lambda node: np.frombuffer(
        base64.b64decode(node["data"]), dtype=node["$packed"].replace("b", "?")
    ).tolist(),
    "$member": lambda node: node["name"],
    "$complex": lambda node: complex(*_decode(node["$complex"], {})),
    "$str": lambda node: base64.b64decode(node["$str"]).decode("utf-16-le", "surrogatepass"),
    "$bytes": lambda node: base64.b64decode(node["$bytes"]),
    "$bytearray": lambda node: bytearray(base64.b64decode(node["$bytearray"])),
    "$path": lambda node: _decode(node["$path"], {}),
    "$purepath": lambda node: _decode(node["$purepath"], {}),
    "$range": lambda node: range(*node["$range"]),
}
