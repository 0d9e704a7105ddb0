"""What a lingering worker offers: its slots, and the snapshots in them with their records.

It is sent as sealed memory: 8 bytes of length, JSON, then the records. `Snapshot` decodes a record
only when it is asked for, since of several offered one is restored. Whether a slot still holds what
its record says is for the digests to tell: the trainer may have died while it filled that slot.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from checkfreq.errors import ConfigError, CorruptCheckpointError
from checkfreq.persist import protocol as p
from checkfreq.persist.frames import MOST_SLOTS, HandoverError, Stage, is_count, is_time
from checkfreq.store.fileops import write_all
from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.types import PAGE_BYTES, FileSpec, Json, Role, TensorSpec

MOST_BODY_BYTES = 1 << 31
MOST_TEXT_BYTES = 64 << 20

_TEXT_LENGTH = struct.Struct("!Q")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot in a slot. ``record``: the manifest, or that of this rank's part.

    ``slot_offsets``: where in the slot each file of the record begins. ``extras``: what a
    ``protocol.Persist`` says that no record holds. `manifest`, `layout` and `request` raise
    CorruptCheckpointError for a record that is damaged, or does not fit the rest.
    """

    step: int
    attempt: str
    slot: int
    slot_bytes: int
    stage: Stage
    slot_offsets: Mapping[str, int]
    extras: Mapping[str, Json]
    record: bytes

    @cached_property
    def manifest(self) -> Manifest:
        """The record; only its digests say whether the slot still holds what it describes."""
        where = f"slot {self.slot} in memory"
        try:
            manifest = Manifest.decode(self.record, path=where)
        except ConfigError as error:  # a newer format: of a version that was refused
            raise self._damage("format", "this version's", str(error)) from None
        if (manifest.step, manifest.attempt) != (self.step, self.attempt):
            found = f"{manifest.step} of {manifest.attempt}"
            raise self._damage("step", f"{self.step} of {self.attempt}", found)
        return manifest

    @cached_property
    def layout(self) -> tuple[FileSpec, ...]:
        """Where each file lies in the slot; they overlap nowhere."""
        files = self.manifest.files
        if {file.name for file in files} != self.slot_offsets.keys():
            raise self._damage("files", sorted(self.slot_offsets), [f.name for f in files])
        specs = tuple(_spec_of(file, self.slot_offsets[file.name]) for file in files)
        end = 0
        for spec in sorted(specs, key=lambda spec: spec.slot_offset):
            if spec.slot_offset < end or spec.slot_offset % PAGE_BYTES:
                raise self._damage(f"{spec.name}: slot_offset", f"a page from {end} on", spec)
            end = spec.slot_offset + spec.num_bytes
        if end > self.slot_bytes:
            raise self._damage("end of its files", f"at most {self.slot_bytes}", end)
        return specs

    def request(self, *, rank: int) -> p.Persist:
        """The request that made, or would make, a checkpoint of it."""
        record = self.manifest
        return p.Persist(
            attempt=self.attempt,
            step=self.step,
            slot=self.slot,
            objects=record.objects,
            world=record.world,
            versions=record.versions,
            own=record.ranks.get(rank),
            **self.extras,
        )

    def _damage(self, check: str, expected: object, got: object) -> CorruptCheckpointError:
        where = f"slot {self.slot} in memory"
        return CorruptCheckpointError(where, check=check, expected=expected, got=f"{got!r:.200}")


def _spec_of(file: FileEntry, slot_offset: int) -> FileSpec:
    tensors = tuple(
        TensorSpec(t.name, t.dtype, t.shape, t.offset, t.num_bytes, t.piece_bytes)
        for t in file.tensors
    )
    return FileSpec(file.name, slot_offset, file.num_bytes, file.header_bytes, tensors)


@dataclass(frozen=True, slots=True)
class Body:
    """What is offered: all ``slots`` (number and size, in the order of their descriptors)."""

    role: Role
    slots: tuple[tuple[int, int], ...]
    snapshots: tuple[Snapshot, ...]

    @property
    def in_flight(self) -> list[Snapshot]:
        """The snapshots that are being written, in the order in which they were handed over."""
        found = (one for one in self.snapshots if one.stage is Stage.IN_FLIGHT)
        return sorted(found, key=lambda one: one.step)

    @property
    def newest_slot(self) -> int | None:
        """The slot with the newest snapshot."""
        newest = max(self.snapshots, key=lambda one: one.step, default=None)
        return None if newest is None else newest.slot


_EXTRAS: dict[str, Callable[[object], bool]] = {
    "supersede_after": lambda value: value is None or (type(value) is int and value >= -1),
    "keep": lambda value: type(value) is bool,
    "metrics": lambda value: (
        isinstance(value, dict) and all(type(number) in (int, float) for number in value.values())
    ),
    "part_timeout_s": is_time,
    "at_epoch_end": lambda value: type(value) is bool,
}


def extras_of(request: p.Persist) -> dict[str, Json]:
    """What a request says beyond its record."""
    return {name: getattr(request, name) for name in _EXTRAS}


def encode_body(body: Body) -> int:
    """The body as sealed memory: a descriptor, which the caller closes."""
    role = body.role
    text = json.dumps(
        {
            "role": [role.rank, role.world, list(role.group), role.split],
            "slots": body.slots,
            "snapshots": [_snapshot_fields(one) for one in body.snapshots],
        }
    ).encode()
    fd = os.memfd_create("checkfreq-offer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for piece in (_TEXT_LENGTH.pack(len(text)), text, *(one.record for one in body.snapshots)):
            write_all(fd, piece)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _snapshot_fields(snapshot: Snapshot) -> dict[str, Json]:
    return {
        "step": snapshot.step,
        "attempt": snapshot.attempt,
        "slot": snapshot.slot,
        "stage": snapshot.stage.value,
        "slot_offsets": dict(snapshot.slot_offsets),
        "extras": dict(snapshot.extras),
        "record_bytes": len(snapshot.record),
    }


def decode_body(fd: int) -> Body:
    """The body behind a descriptor; HandoverError if there is none."""
    try:
        size = os.fstat(fd).st_size
        if not _TEXT_LENGTH.size <= size <= MOST_BODY_BYTES:
            raise HandoverError(f"an offer of {size} bytes")
        return _body_of(_read_all(fd, size))
    except HandoverError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise HandoverError(f"expected an offer: {error!r:.200}") from None


def _body_of(data: bytes) -> Body:
    (length,) = _TEXT_LENGTH.unpack_from(data)
    at = _TEXT_LENGTH.size + length
    _require(length <= MOST_TEXT_BYTES and at <= len(data), "length of the text", length)
    value = json.loads(data[_TEXT_LENGTH.size : at])
    slots = tuple(_slot_of(*pair) for pair in value["slots"])
    sizes = dict(slots)
    _require(len(sizes) == len(slots) <= MOST_SLOTS, "slots", slots)
    snapshots = []
    for fields in value["snapshots"]:
        size = fields["record_bytes"]
        _require(is_count(size) and at + size <= len(data), "record_bytes", size)
        snapshots.append(_snapshot_of(fields, sizes, data[at : at + size]))
        at += size
    held = {one.slot for one in snapshots}
    _require(at == len(data) and len(held) == len(snapshots), "length", len(data))
    return Body(_role_of(*value["role"]), slots, tuple(snapshots))


def _slot_of(index: Json, num_bytes: Json) -> tuple[int, int]:
    _require(is_count(index) and is_count(num_bytes) and num_bytes > 0, "slot", index)
    return index, num_bytes


def _role_of(rank: Json, world: Json, group: Json, split: Json) -> Role:
    _require(all(map(is_count, (rank, world, *group))) and rank in group, "role", (rank, group))
    _require(group == sorted(set(group)) and group[-1] < world, "group", group)
    _require(type(split) is bool, "split", split)
    return Role(rank, world, tuple(group), split)


def _snapshot_of(fields: Json, sizes: Mapping[int, int], record: bytes) -> Snapshot:
    step, attempt, slot = fields["step"], fields["attempt"], fields["slot"]
    offsets, extras = fields["slot_offsets"], fields["extras"]
    _require(is_count(step), "step", step)
    _require(_ATTEMPT.fullmatch(attempt) is not None, "attempt", attempt)
    _require(is_count(slot) and slot in sizes, "slot", slot)
    _require(isinstance(offsets, dict) and all(map(is_count, offsets.values())), "files", offsets)
    _require(isinstance(extras, dict) and extras.keys() == _EXTRAS.keys(), "extras", extras)
    for name, value in extras.items():
        _require(_EXTRAS[name](value), name, value)
    stage = Stage(fields["stage"])
    return Snapshot(step, attempt, slot, sizes[slot], stage, offsets, extras, record)


def _require(holds: bool, what: str, got: object) -> None:
    if not holds:
        raise HandoverError(f"{what}: {got!r:.200}")


def _read_all(fd: int, size: int) -> bytes:
    pieces, at = [], 0
    while at < size and (piece := os.pread(fd, size - at, at)):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)
