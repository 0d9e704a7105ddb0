"""The commit record: a checkpoint's files, byte for byte, and its non-tensor state.

``manifest.json`` is JSON that people can read. Its first line has the same form in every format
version, so that a reader can tell a newer manifest from a damaged one::

    {"format_version": 1, "digest": "<xxh3_64 of the whole file with this digest as zeros>",

Version 1 is a checkpoint of one rank. Version 2 has ``ranks``, and is written only for many. In
version 3 a tensor may have ``piece_bytes`` and one digest for each piece of so many bytes, one
after another (see `digests`), and frozen parameters may have a file of their own
(`FROZEN_ENDING`); ``ranks`` is there for many ranks only. Version 4 names the records of the ranks
and does not hold them: see `tree`. A manifest is validated when
it is made and again when it is read, by the same code. The tensors of a file follow its header
without gaps, so every byte of every file is covered by a digest. Digests are xxh3_64, as 16
hexadecimal digits. No torch, no I/O.

The size of a manifest is bounded by `most_bytes`: a tensor's entry takes a few times the bytes of
its entry in the file's header, digests of pieces a small part of the pieces, and all other state
has a fixed allowance.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from checkfreq.errors import ConfigError, CorruptCheckpointError
from checkfreq.store.checks import (
    LARGEST,
    ManifestError,
    as_object,
    is_count,
    is_time,
    load_json,
    require,
    require_count,
    require_depth,
    require_match,
    require_unique,
    tuple_of,
)
from checkfreq.store.digests import DIGEST_DIGITS, num_pieces
from checkfreq.store.gc_pause import gc_paused
from checkfreq.types import Json

#: The newest version that can be read. Each manifest is written in the oldest that can express it.
FORMAT_VERSION = 4
#: The newest version of a record that names every file.
_NEWEST_WHOLE = 3
MANIFEST_NAME = "manifest.json"
#: Ends the name of a file with those tensors of an object that are not expected to change.
FROZEN_ENDING = ".frozen.safetensors"
#: The end of the name of a file with non-persistent buffers, which are no part of a state dict.
BUFFERS_ENDING = ".buffers.safetensors"
#: The name of the iterators' positions, which are no tracked object.
POSITIONS = "$positions"

#: Allowance for everything but tensors. A list of a million numbers takes a third of it.
STATE_BYTES = 64 << 20
#: A tensor's entry here, over its entry in the file's header: at most 5 times as long, and 14 if
#: JSON escapes every character of its name (measured 2026-11).
_BYTES_PER_HEADER_BYTE = 16
#: Bytes of a payload for one byte of digests: most pieces have 64 times as many, the shortest ones
#: of long shards twice; and an allowance for all of them, which is enough for 16 TiB.
_BYTES_PER_DIGEST_BYTE = 1 << 10
_MOST_DIGEST_BYTES = 256 << 20
_MAX_DIMS = 1024

#: The 8-byte length with which a safetensors file begins.
_MIN_HEADER_BYTES = 8
_NO_DIGEST = b"0" * 16
_FRAME = re.compile(rb'\{"format_version": ([0-9]{1,9}), "digest": "([0-9a-f]{16})",\n')
DIGEST = re.compile(r"[0-9a-f]{16}")
_DIGESTS = re.compile(r"[0-9a-f]+")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,31}")
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")

#: Bytes per element. A dtype not listed here may be newer than this code: its size is not checked.
_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its key, torch's dtype name, shape, the place and digest of its bytes.

    ``piece_bytes``: ``digest`` is that of each piece of so many bytes; 0 if it is of all bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    digest: str
    piece_bytes: int = 0

    def __post_init__(self) -> None:
        # One expression decides, since there may be a million tensors; the slow, exact checks
        # run only to find out what is wrong.
        if not self._is_sound():
            self._refuse()

    def _is_sound(self) -> bool:
        numbers = (*self.shape, self.offset, self.num_bytes)
        item_bytes = _ITEM_BYTES.get(self.dtype) if type(self.dtype) is str else None
        return (
            item_bytes is not None
            and type(self.name) is type(self.digest) is str
            and len(numbers) < _MAX_DIMS
            and all(map(is_count, numbers))
            and self.num_bytes == item_bytes * math.prod(self.shape)
            and (self.num_bytes > 0 or _can_be(self.shape))
            and (
                DIGEST.fullmatch(self.digest) is not None
                if self.piece_bytes == 0 and type(self.piece_bytes) is int
                else self._is_cut_soundly(item_bytes)
            )
        )

    def _is_cut_soundly(self, item_bytes: int) -> bool:
        return (
            is_count(self.piece_bytes)
            and 0 < self.piece_bytes < self.num_bytes
            and self.piece_bytes % item_bytes == 0
            and len(self.digest) == DIGEST_DIGITS * num_pieces(self)
            and _DIGESTS.fullmatch(self.digest) is not None
        )

    def _refuse(self) -> None:
        """Raise ManifestError for what is wrong; returns if it is only a dtype not known here."""
        require(isinstance(self.name, str), "tensor name", "a string", self.name)
        where = f"tensor {self.name!r:.80}"
        require_match(_DTYPE, self.dtype, f"{where}: dtype", "the name of a dtype")
        dims = len(self.shape)
        require(dims <= _MAX_DIMS, f"{where}: dimensions", f"at most {_MAX_DIMS}", dims)
        for size in self.shape:
            require_count(size, f"{where}: shape")
        require(_can_be(self.shape), f"{where}: shape", "that of a tensor", self.shape)
        require_count(self.offset, f"{where}: offset")
        require_count(self.num_bytes, f"{where}: num_bytes")
        item_bytes = _ITEM_BYTES.get(self.dtype)
        if item_bytes is not None:
            expected = item_bytes * math.prod(self.shape)
            require(self.num_bytes == expected, f"{where}: num_bytes", expected, self.num_bytes)
        self._refuse_digests(where, item_bytes or 1)

    def _refuse_digests(self, where: str, item_bytes: int) -> None:
        require_count(self.piece_bytes, f"{where}: piece_bytes")
        if self.piece_bytes:
            fits = self.piece_bytes < self.num_bytes and self.piece_bytes % item_bytes == 0
            expected = f"whole elements of {item_bytes} bytes, less than {self.num_bytes} bytes"
            require(fits, f"{where}: piece_bytes", expected, self.piece_bytes)
        digits = DIGEST_DIGITS * num_pieces(self)
        require_match(_DIGESTS, self.digest, f"{where}: digest", f"{digits} hexadecimal digits")
        there = len(self.digest)
        require(there == digits, f"{where}: digest", f"{digits} hexadecimal digits", there)


#: The fields of a tensor that is one piece, which are all that versions 1 and 2 know.
_UNCUT = TensorEntry.__slots__[:-1]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One payload file: a header of ``header_bytes``, then tensors up to ``num_bytes``."""

    name: str
    num_bytes: int
    header_bytes: int
    header_digest: str
    tensors: tuple[TensorEntry, ...]

    def __post_init__(self) -> None:
        require(_is_file_name(self.name), "file name", "a plain file name", self.name)
        require_count(self.num_bytes, f"{self.name}: num_bytes")
        require_count(self.header_bytes, f"{self.name}: header_bytes")
        in_range = _MIN_HEADER_BYTES <= self.header_bytes <= self.num_bytes
        limits = f"from {_MIN_HEADER_BYTES} to {self.num_bytes}"
        require(in_range, f"{self.name}: header_bytes", limits, self.header_bytes)
        digest = self.header_digest
        require_match(DIGEST, digest, f"{self.name}: header_digest", "16 hexadecimal digits")
        require_unique((tensor.name for tensor in self.tensors), f"{self.name}: tensor names")
        self._check_tiling()

    def in_file_order(self) -> tuple[TensorEntry, ...]:
        """The tensors by offset; empty ones come before the tensor that starts at their offset."""
        return tuple(sorted(self.tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)))

    def _check_tiling(self) -> None:
        end = self.header_bytes
        for tensor in self.in_file_order():
            check = f"{self.name}: offset of tensor {tensor.name!r:.80}"
            require(tensor.offset == end, check, end, tensor.offset)
            end += tensor.num_bytes
        require(end == self.num_bytes, f"{self.name}: end of its tensors", self.num_bytes, end)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint. ``objects`` holds the JSON state tree of each tracked name.

    ``ranks``: the JSON of each rank's own state, by rank and name. Empty for a run of one rank.
    """

    step: int
    attempt: str
    world: int
    created_unix_s: float
    versions: dict[str, str]
    files: tuple[FileEntry, ...]
    objects: Json
    ranks: dict[int, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_count(self.step, "step")
        require_match(_ATTEMPT, self.attempt, "attempt", "letters, digits, - and _")
        require_count(self.world, "world")
        require(self.world >= 1, "world", "at least 1", self.world)
        require(is_time(self.created_unix_s), "created_unix_s", "a time", self.created_unix_s)
        require_unique((file.name for file in self.files), "file names")
        _check_objects(self.objects, "objects")
        require(isinstance(self.ranks, dict), "ranks", "an object", self.ranks)
        for rank, own in self.ranks.items():
            below = type(rank) is int and 0 <= rank < self.world
            require(below, "rank", f"a whole number below world {self.world}", rank)
            _check_objects(own, f"objects of rank {rank}")
        require(isinstance(self.versions, dict), "versions", "an object", self.versions)
        texts = all(isinstance(text, str) for text in self.versions.values())
        require(texts, "versions", "strings", self.versions)

    @property
    def format_version(self) -> int:
        """The oldest format version that can express this manifest."""
        if any(_is_of_version_3(t) for file in self.files for t in file.tensors):
            return 3
        if any(_has_odd_state(own) for own in (self.objects, *self.ranks.values())):
            return 3
        if any(file.name.endswith((FROZEN_ENDING, BUFFERS_ENDING)) for file in self.files):
            return 3
        return 2 if self.ranks else 1

    @property
    def num_bytes(self) -> int:
        """Bytes in all payload files."""
        return sum(file.num_bytes for file in self.files)

    def file(self, name: str) -> FileEntry:
        """The payload file called ``name``; KeyError if there is none."""
        for entry in self.files:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def encode(self) -> bytes:
        """The file's bytes; ValueError if ``objects`` holds what JSON cannot express."""
        return sealed(self.format_version, fields_text(self))

    @staticmethod
    def decode(data: bytes, *, path: Path | str) -> Manifest:
        """The manifest in ``data``; ``path`` is the file it came from, for messages.

        Raises CorruptCheckpointError if it is damaged or has impossible values, and ConfigError
        if it is intact but of a newer format than this version can read.
        """
        version = sealed_version(data, path=path)
        try:
            with gc_paused():
                return _manifest_from(load_json(data), version)
        except ManifestError as error:
            raise CorruptCheckpointError(
                str(path), check=error.check, expected=error.expected, got=error.got
            ) from None


def _is_of_version_3(tensor: TensorEntry) -> bool:
    return bool(tensor.piece_bytes or tensor.dtype.startswith("float4"))


def _has_odd_state(objects: Json) -> bool:
    """Whether an object holds what older versions would take for damage."""
    return any(
        isinstance(json, dict) and ("composed" in json or json.get("kind") == "list")
        for name, json in objects.items()
        if name != POSITIONS
    )


def most_bytes(header_bytes: int, payload_bytes: int) -> int:
    """The largest manifest for files whose headers have ``header_bytes`` with content.

    ``payload_bytes``: the sizes of the files. The writer refuses a larger manifest
    (`CheckpointStore.commit`), and readers do not open it.
    """
    digests = min(payload_bytes // _BYTES_PER_DIGEST_BYTE, _MOST_DIGEST_BYTES)
    return STATE_BYTES + _BYTES_PER_HEADER_BYTE * header_bytes + digests


def sealed(version: int, fields: str) -> bytes:
    """A record: its first line, with the digest of the whole, and then its fields as JSON text."""
    head = f'{{"format_version": {version}, "digest": "'.encode()
    tail = f'",\n{fields}}}\n'.encode("ascii")
    return head + digest_of(head, _NO_DIGEST, tail).encode() + tail


def seal_of(data: bytes) -> str:
    """The digest that a record's first line gives; `sealed_version` checks that it is right."""
    frame = _FRAME.match(data)
    assert frame is not None
    return frame[2].decode()


def sealed_version(data: bytes, *, path: Path | str) -> int:
    """The format version of a record; raises as `Manifest.decode` does for its first line."""
    frame = _FRAME.match(data)
    if frame is None:  # its bytes are not quoted: the file may not be ours
        raise CorruptCheckpointError(
            str(path), check="first line", expected="a manifest", got="something else"
        )
    _check_own_digest(data, frame, path)
    version = int(frame[1])
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format version {version}, and this checkfreq reads up to "
            f"{FORMAT_VERSION}. The checkpoint is whole: read it with a newer checkfreq."
        )
    return version


def digest_of(*pieces: bytes | bytearray | memoryview) -> str:
    """xxh3_64 of the pieces one after another, as 16 hexadecimal digits."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return str(state.hexdigest())


def fields_text(manifest: Manifest) -> str:
    """Every field after the first line: one line per field, tensor and tracked object."""
    fields = [
        f'"step": {manifest.step}',
        f'"attempt": {json_text(manifest.attempt)}',
        f'"world": {manifest.world}',
        f'"created_unix_s": {json_text(manifest.created_unix_s)}',
        f'"versions": {json_text(manifest.versions)}',
        f'"files": [{json_lines(map(_file_text, manifest.files))}]',
        f'"objects": {_objects_text(manifest.objects)}',
    ]
    if manifest.ranks:
        ranks = sorted(manifest.ranks.items())
        fields.append(f'"ranks": {{{json_lines(_rank_text(*item) for item in ranks)}}}')
    return ",\n".join(fields)


def _file_text(file: FileEntry) -> str:
    head = f'"name": {json_text(file.name)}, "num_bytes": {file.num_bytes}'
    header = (
        f'"header_bytes": {file.header_bytes}, "header_digest": {json_text(file.header_digest)}'
    )
    tensors = json_lines(map(_tensor_text, file.tensors))
    return f'{{{head}, {header}, "tensors": [{tensors}]}}'


def _tensor_text(tensor: TensorEntry) -> str:
    names = TensorEntry.__slots__ if tensor.piece_bytes else _UNCUT
    return json_text({name: getattr(tensor, name) for name in names})


def _rank_text(rank: int, own: Json) -> str:
    return f'"{rank}": {_objects_text(own)}'


def _objects_text(objects: Json) -> str:
    return f"{{{json_lines(map(_object_text, objects.items()))}}}"


def _object_text(item: tuple[str, Json]) -> str:
    return f"{json_text(item[0])}: {json_text(item[1])}"


def json_lines(texts: Iterable[str]) -> str:
    """Items of a list or an object, a line each."""
    return ",".join(f"\n{text}" for text in texts)


def json_text(value: Json) -> str:
    """A value on one line; ValueError for what JSON cannot express."""
    return json.dumps(value, allow_nan=False)


def _check_own_digest(data: bytes, frame: re.Match[bytes], path: Path | str) -> None:
    view = memoryview(data)
    expected = frame[2].decode()
    got = digest_of(view[: frame.start(2)], _NO_DIGEST, view[frame.end(2) :])
    if got != expected:
        raise CorruptCheckpointError(str(path), check="own digest", expected=expected, got=got)


# Decoding is written by hand: the schema library we tried (msgspec 0.22, 2026-11) accepts repeated
# keys silently, and would replace only the code below, not the checks of values above.


def _manifest_from(value: Json, version: int) -> Manifest:
    expected = f"from 1 to {_NEWEST_WHOLE}"
    require(1 <= version <= _NEWEST_WHOLE, "format_version", expected, version)
    made = manifest_of(value, has_ranks=version == 2 or (version > 2 and "ranks" in value))
    require(made.format_version == version, "format_version", made.format_version, version)
    return made


def manifest_of(value: dict[str, Json], *, has_ranks: bool) -> Manifest:
    """The manifest of a record's fields; ManifestError if they are others, or cannot be."""
    fields = dict(value)
    del fields["format_version"], fields["digest"]
    require_depth({name: inner for name, inner in fields.items() if name != "files"})
    fields["files"] = tuple_of(fields.get("files"), _file_from)
    if has_ranks:
        fields["ranks"] = _ranks_from(fields.get("ranks"))
    return _made(Manifest, Manifest.__slots__ if has_ranks else Manifest.__slots__[:-1], fields)


def _ranks_from(value: Json) -> dict[int, Json]:
    found = as_object(value, "ranks")
    require(bool(found), "ranks", "at least one", found)
    for rank in found:  # no leading zeros, so that two keys are never the same rank
        require_match(_RANK, rank, "rank", "a whole number in decimal digits")
    return {int(rank): own for rank, own in found.items()}


def _file_from(value: Json) -> FileEntry:
    fields = as_object(value, "file entry")
    return _made(
        FileEntry,
        FileEntry.__slots__,
        {**fields, "tensors": tuple_of(fields.get("tensors"), _tensor_from)},
    )


def _tensor_from(value: Json) -> TensorEntry:
    fields = as_object(value, "tensor entry")
    require(fields.get("piece_bytes", 1) != 0, "piece_bytes", "none, or more than 0", 0)
    return _made(
        TensorEntry,
        TensorEntry.__slots__ if "piece_bytes" in fields else _UNCUT,
        {**fields, "shape": tuple_of(fields.get("shape"), lambda size: size)},
    )


def _made(kind: Callable[..., T], names: Iterable[str], fields: Mapping[str, Json]) -> T:
    if fields.keys() != {*names}:
        raise ManifestError("names of fields", sorted(names), sorted(fields))
    return kind(**fields)


def _check_objects(value: Json, what: str) -> None:
    require(isinstance(value, dict), what, "an object", value)
    named = all(isinstance(name, str) for name in value)
    require(named, f"names of {what}", "strings", list(value))


def _can_be(shape: Iterable[int]) -> bool:
    """Whether a tensor can have the shape, even an empty one: its strides must fit in 64 bits."""
    return math.prod(max(size, 1) for size in shape) <= LARGEST


def _is_file_name(value: Any) -> bool:
    """Whether a name stays inside the checkpoint, and is neither hidden nor the manifest's."""
    if not isinstance(value, str) or value == MANIFEST_NAME or not value.isprintable():
        return False
    return not value.startswith(".") and "/" not in value and 0 < len(value.encode()) <= 255
