"""What lies where under a mirror's prefix, and the small JSON objects there.

::

    claim.json                        who writes here
    objects/<xxh3-128>-<bytes>        pieces of payload files, named by their content
    manifests/step-<step>-<attempt>.json   a checkpoint's manifest, byte for byte
    checkpoints/step-<step>.json      the marker: names the manifest and the pieces of each file
    superseded/step-<step>-<attempt>.json  a marker that was set aside when the run went back
    marks.json, finished.json         pins and metrics; whether the run is finished

A marker is written last, with one request, and removed first. So a marker that is there names only
objects that are there, and the newest checkpoint is the highest step among the markers. Readers
trust none of it: everything is validated here, sizes are bounded, and the bytes of pieces are
compared with the digests of the manifest as those of a file are.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from checkfreq.errors import ConfigError, CorruptCheckpointError
from checkfreq.store.manifest import MANIFEST_NAME
from checkfreq.store.marks import StepMark, line_of, read_marks
from checkfreq.types import Json

FORMAT = "checkfreq-mirror"
#: The newest version that can be read.
VERSION = 1

CLAIM = "claim.json"
MARKS = "marks.json"
FINISHED = "finished.json"
OBJECTS = "objects/"
MANIFESTS = "manifests/"
CHECKPOINTS = "checkpoints/"
SUPERSEDED = "superseded/"

#: No reader takes more of a small object. A marker needs about 120 bytes for 8 to 64 MiB.
SMALL_MAX_BYTES = 64 << 20

_LARGEST = 2**63 - 1
_DIGEST = re.compile(r"[0-9a-f]{32}")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OBJECT = re.compile(r"objects/([0-9a-f]{32})-(0|[1-9][0-9]{0,18})")
_MANIFEST = re.compile(r"manifests/step-([0-9]{8,18})-([A-Za-z0-9_-]{1,64})\.json")
_MARKER = re.compile(r"checkpoints/step-([0-9]{8,18})\.json")
_SUPERSEDED = re.compile(r"superseded/step-([0-9]{8,18})-([A-Za-z0-9_-]{1,64})\.json")

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120


def digest_of(*buffers: bytes | bytearray | memoryview) -> str:
    """xxh3_128 of the buffers one after another, as 32 hexadecimal digits."""
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return str(state.hexdigest())


def object_key(digest: str, num_bytes: int) -> str:
    """Where a piece with this content is."""
    return f"{OBJECTS}{digest}-{num_bytes}"


def manifest_key(step: int, attempt: str) -> str:
    """Where the manifest of an attempt is."""
    return f"{MANIFESTS}step-{step:08d}-{attempt}.json"


def marker_key(step: int) -> str:
    """Where the marker of a step is."""
    return f"{CHECKPOINTS}step-{step:08d}.json"


def superseded_key(step: int, attempt: str) -> str:
    """Where the marker of an attempt is set aside."""
    return f"{SUPERSEDED}step-{step:08d}-{attempt}.json"


def step_of_marker(key: str) -> int | None:
    """The step whose marker has this key; None for other keys."""
    match = _MARKER.fullmatch(key)
    if match is None:
        return None
    step = int(match[1])
    return step if key == marker_key(step) else None


def step_of_manifest(key: str) -> int | None:
    """The step whose manifest has this key; None for other keys."""
    match = _MANIFEST.fullmatch(key)
    return None if match is None else int(match[1])


def is_superseded_key(key: str) -> bool:
    """Whether a marker that was set aside has this key."""
    return _SUPERSEDED.fullmatch(key) is not None


def piece_of_key(key: str) -> Blob | None:
    """The piece with this key; None for other keys."""
    match = _OBJECT.fullmatch(key)
    return None if match is None else Blob(key, int(match[2]), match[1])


@dataclass(frozen=True, slots=True)
class Blob:
    """An object with known content: its key, length and xxh3_128."""

    key: str
    num_bytes: int
    digest: str

    @staticmethod
    def piece(digest: str, num_bytes: int) -> Blob:
        """The piece with this content."""
        return Blob(object_key(digest, num_bytes), num_bytes, digest)

    def to_json(self) -> Json:
        """As in a marker."""
        return {"key": self.key, "bytes": self.num_bytes, "digest": self.digest}


@dataclass(frozen=True, slots=True)
class Marker:
    """A checkpoint that is complete in the mirror. ``files``: the pieces of each, in file order."""

    step: int
    attempt: str
    created_unix_s: float
    manifest: Blob
    files: Mapping[str, tuple[Blob, ...]]
    at_epoch_end: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of its payload files."""
        return sum(piece.num_bytes for pieces in self.files.values() for piece in pieces)

    def keys(self) -> set[str]:
        """Every object that it names."""
        named = {piece.key for pieces in self.files.values() for piece in pieces}
        return {self.manifest.key, *named}

    def encode(self) -> bytes:
        """The object's bytes."""
        files = {name: [piece.to_json() for piece in ps] for name, ps in self.files.items()}
        return _encode(
            {
                "step": self.step,
                "attempt": self.attempt,
                "created_unix_s": self.created_unix_s,
                "manifest": self.manifest.to_json(),
                "files": files,
                "at_epoch_end": self.at_epoch_end,
            }
        )

    @staticmethod
    def decode(data: bytes, *, key: str, url: str = "") -> Marker:
        """The marker in ``data``, which is the object ``key`` of the mirror at ``url``.

        Raises CorruptCheckpointError if it is damaged, and ConfigError if it is of a newer format.
        """
        with_place = _Place(f"{url}/{key}" if url else key)
        fields = with_place.fields(
            data, ("step", "attempt", "created_unix_s", "manifest", "files", "at_epoch_end")
        )
        step, attempt = fields["step"], fields["attempt"]
        with_place.require(_is_count(step), "step", "a whole number >= 0", step)
        with_place.require(
            isinstance(attempt, str) and _ATTEMPT.fullmatch(attempt) is not None,
            "attempt",
            "letters, digits, - and _",
            attempt,
        )
        named = {marker_key(step), superseded_key(step, attempt)}
        with_place.require(key in named, "step", f"that of {key}", step)
        time_s = fields["created_unix_s"]
        with_place.require(_is_time(time_s), "created_unix_s", "a time", time_s)
        ends = fields["at_epoch_end"]
        with_place.require(type(ends) is bool, "at_epoch_end", "true or false", ends)
        manifest = with_place.blob(fields["manifest"], "manifest")
        expected = manifest_key(step, attempt)
        with_place.require(manifest.key == expected, "manifest", expected, manifest.key)
        return Marker(step, attempt, time_s, manifest, with_place.files(fields["files"]), ends)


def encode_marks(marks: Mapping[int, StepMark]) -> bytes:
    """``marks.json``: a list of what would be the lines of ``marks.jsonl``, one per step."""
    lines = [line_of(step, mark) for step, mark in sorted(marks.items())]
    return _encode({"marks": [json.loads(line) for line in lines]})


def decode_marks(data: bytes, *, url: str = "") -> dict[int, StepMark]:
    """The marks by step; entries that are none are skipped, as in ``marks.jsonl``."""
    place = f"{url}/{MARKS}" if url else MARKS
    found = _Place(place).fields(data, ("marks",))["marks"]
    _Place(place).require(isinstance(found, list), "marks", "a list", found)
    return read_marks("\n".join(map(json.dumps, found)).encode(), path=Path(place))


@dataclass(frozen=True, slots=True)
class Finish:
    """``finished.json``: whether the run is finished with ``step``."""

    step: int
    finished: bool = True

    def encode(self) -> bytes:
        """The object's bytes."""
        return _encode({"step": self.step, "finished": self.finished})

    @staticmethod
    def decode(data: bytes, *, url: str = "") -> Finish:
        """Raises like `Marker.decode`."""
        place = _Place(f"{url}/{FINISHED}" if url else FINISHED)
        fields = place.fields(data, ("step", "finished"))
        step, finished = fields["step"], fields["finished"]
        place.require(_is_count(step), "step", "a whole number >= 0", step)
        place.require(type(finished) is bool, "finished", "true or false", finished)
        return Finish(step, finished)


@dataclass(frozen=True, slots=True)
class Claim:
    """``claim.json``: the run that writes here.

    run: the run's identity, kept in its checkpoint directory. session: one worker of it. host,
    pid: for people. since_unix_s, renewed_unix_s: times of the writer's clock, for people too:
    whether a claim is alive is told by whether it changes.
    """

    run: str
    session: str
    host: str
    pid: int
    since_unix_s: float
    renewed_unix_s: float = field(compare=False)

    def __str__(self) -> str:
        return f"run {self.run} (process {self.pid} on host {self.host})"

    def encode(self) -> bytes:
        """The object's bytes."""
        return _encode({name: getattr(self, name) for name in Claim.__slots__})

    @staticmethod
    def decode(data: bytes, *, url: str = "") -> Claim:
        """Raises like `Marker.decode`."""
        place = _Place(f"{url}/{CLAIM}" if url else CLAIM)
        fields = place.fields(data, Claim.__slots__)
        for name in ("run", "session", "host"):
            text = fields[name]
            sound = isinstance(text, str) and text.isprintable() and 0 < len(text) <= 255
            place.require(sound, name, "a short text", text)
        place.require(_is_count(fields["pid"]), "pid", "a whole number >= 0", fields["pid"])
        for name in ("since_unix_s", "renewed_unix_s"):
            place.require(_is_time(fields[name]), name, "a time", fields[name])
        return Claim(**fields)


class _Place:
    """Validation of one object, which names the object in what it raises."""

    def __init__(self, path: str) -> None:
        self._path = path

    def require(self, holds: bool, check: str, expected: object, got: object) -> None:
        if not holds:
            raise CorruptCheckpointError(
                self._path, check=check, expected=expected, got=_REPR.repr(got)
            )

    def fields(self, data: bytes, names: Iterable[str]) -> dict[str, Json]:
        """The fields of an object of ours, without format and version."""
        value = self._load(data)
        sound = isinstance(value, dict) and value.get("format") == FORMAT
        self.require(sound, "format", FORMAT, "something else")
        version = value.pop("version", None)
        is_version = type(version) is int and version >= 1
        self.require(is_version, "version", "a whole number >= 1", version)
        if version > VERSION:
            raise ConfigError(
                f"{self._path} has format version {version}, and this checkfreq reads up to "
                f"{VERSION}. The mirror is whole: read it with a newer checkfreq."
            )
        del value["format"]
        self.require(value.keys() == {*names}, "names of fields", sorted(names), sorted(value))
        return dict(value)

    def files(self, value: Json) -> dict[str, tuple[Blob, ...]]:
        self.require(isinstance(value, dict), "files", "an object", value)
        return {name: self._pieces(name, pieces) for name, pieces in value.items()}

    def blob(self, value: Json, what: str) -> Blob:
        sound = isinstance(value, dict) and value.keys() == {"key", "bytes", "digest"}
        self.require(sound, what, "key, bytes and digest", value)
        key, num_bytes, digest = value["key"], value["bytes"], value["digest"]
        self.require(isinstance(key, str), f"{what}: key", "a text", key)
        self.require(_is_count(num_bytes), f"{what}: bytes", "a whole number >= 0", num_bytes)
        has_digest = isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None
        self.require(has_digest, f"{what}: digest", "32 hexadecimal digits", digest)
        return Blob(key, num_bytes, digest)

    def _pieces(self, name: str, value: Json) -> tuple[Blob, ...]:
        self.require(_is_file_name(name), "file name", "a plain file name", name)
        self.require(isinstance(value, list) and bool(value), name, "a list of pieces", value)
        pieces = tuple(self.blob(one, f"{name}: piece {i}") for i, one in enumerate(value))
        for piece in pieces:
            expected = object_key(piece.digest, piece.num_bytes)
            self.require(piece.key == expected, f"{name}: key", expected, piece.key)
        return pieces

    def _load(self, data: bytes) -> Json:
        try:
            return json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(
                self._path, check="JSON", expected="a JSON text", got=_REPR.repr(str(error))
            ) from None


def _encode(fields: Mapping[str, Json]) -> bytes:
    record = {"format": FORMAT, "version": VERSION, **fields}
    return f"{json.dumps(record, allow_nan=False)}\n".encode()


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is not a JSON number")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= _LARGEST


def _is_file_name(value: str) -> bool:
    if value == MANIFEST_NAME or not value.isprintable() or value.startswith("."):
        return False
    return "/" not in value and 0 < len(value.encode(errors="replace")) <= 255
