"""What others wrote, as a committed checkpoint of ours.

The state is laid out as a snapshot would be. Then each tensor is read, digested and written in
turn, so that no more than one of them is in memory. The directory's lock is held, and the commit is
that of every checkpoint; what is on disk then is read once more and compared with its digests.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from checkfreq import __version__
from checkfreq.errors import ConfigError, storage_errors
from checkfreq.formats.kinds import Ready, add_object, is_module_state
from checkfreq.formats.stand_ins import StandIns, bytes_of
from checkfreq.helpers.stream import PayloadStream
from checkfreq.integrations.dcp.commit import Commit
from checkfreq.restore.load import require_memory
from checkfreq.restore.validation import validate_state
from checkfreq.snapshot.layout import StateLayout
from checkfreq.state.adapters.rng import capture_rng
from checkfreq.state.capture import GRADIENTS, POSITIONS, RNG
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.collector import CapturedState, StateCollector
from checkfreq.store.digests import digest_pieces
from checkfreq.store.fileops import user_path
from checkfreq.store.manifest import MANIFEST_NAME, FileEntry, Manifest, TensorEntry
from checkfreq.store.store import CheckpointStore, Pending
from checkfreq.types import FileSpec, Json

_LOCK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """Which checkpoint an import writes, and the live objects that it is meant for."""

    chk_dir: str | os.PathLike[str]
    step: int
    like: CFCheckpoint | None
    overwrite: bool


@dataclass(slots=True)
class Imported:
    """A state to be imported: objects by name, and what else our own files had beside them."""

    objects: Mapping[str, Any]
    positions: Json = None
    stand_ins: StandIns = field(default_factory=StandIns)


def entries_of(
    content: Any, *, names: Mapping[str, str] | None, like: CFCheckpoint | None, path: str
) -> dict[str, Any]:
    """The objects in what a file holds, by our names.

    ``names``: for ours, theirs. With ``like`` exactly what it tracks; a file that is nothing but
    the weights of one module is what the only tracked object is.
    """
    if names is None and like is None:
        return _all_entries(content)
    wanted = [*(names or {})] if like is None else [*like.tracked]
    theirs = {name: (names or {}).get(name, name) for name in wanted}
    if len(wanted) == 1 and names is None and is_module_state(content):
        return {wanted[0]: content}
    found = content if isinstance(content, Mapping) else {}
    if missing := [key for key in theirs.values() if key not in found]:
        has = ", ".join(str(key) for key in found) if found else f"a {type(content).__qualname__}"
        raise ConfigError(
            f"{path}: expected an entry {', '.join(map(repr, missing))}, found {has:.300}. Say "
            "what each object is called there: names={'model': 'model_state_dict'}"
        )
    chosen = {name: found[key] for name, key in theirs.items()}
    if like is not None and like.rng and RNG in found:
        chosen.setdefault(RNG, found[RNG])
    return chosen


def _all_entries(content: Any) -> dict[str, Any]:
    if is_module_state(content):
        return {"model": content}
    if isinstance(content, Mapping) and content and all(isinstance(key, str) for key in content):
        return dict(content)
    return {"state": content}


def commit(state: Imported, target: Target) -> int:
    """Write and commit a checkpoint; returns its step.

    Raises ConfigError if the step is there already or a run has the directory, StateError for what
    cannot be kept, StorageError.
    """
    _require_target(target, state.objects)
    captured = _capture(state, target.like)
    # A few bytes may be a tensor of any size, expanded.
    tensors = [ref.tensor for ref in captured.tensors]
    made = (one.nbytes for one in tensors if one.nbytes > one.untyped_storage().nbytes())
    require_memory(max(made, default=0))
    layout = StateLayout.plan(captured)
    root = user_path(target.chk_dir)
    attempt = uuid.uuid4().hex
    with storage_errors(f"writing {root}"):
        saving = Commit(root, target.step, overwrite=target.overwrite, attempt=attempt)
        num_bytes = sum(file.num_bytes for file in layout.files)
        saving.begin(num_bytes=num_bytes, lock_timeout_s=_LOCK_TIMEOUT_S)
        try:
            by_key = {(ref.stem, ref.key): ref.tensor for ref in captured.tensors}
            files = []
            for number, file in enumerate(layout.files):
                stem = file.name.removesuffix(".safetensors")
                own = {one.name: by_key[stem, one.name] for one in file.tensors}
                header = layout.header(number)
                files.append(_write(saving.pending, file, header, own, state.stand_ins))
            manifest = _manifest(target.step, attempt, tuple(files), captured.objects)
            validate_state(manifest, path=str(saving.pending.path / MANIFEST_NAME))
            saving.finish(manifest)
        finally:
            saving.give_up()
        CheckpointStore(root).verify(target.step)
    return target.step


def _require_target(target: Target, objects: Mapping[str, Any]) -> None:
    if type(target.step) is not int or target.step < 0:
        raise ConfigError(f"step={target.step!r}: expected a whole number from 0")
    for name, value in objects.items():
        is_ours = name == GRADIENTS and isinstance(value, Ready)
        if not name.isidentifier() and not is_ours:
            raise ConfigError(
                f"{name!r:.80} cannot name a file: expected a Python identifier. Choose what to "
                "import, and its name: names={'model': 'the name there'}"
            )


def _capture(state: Imported, like: CFCheckpoint | None) -> CapturedState:
    collector = StateCollector()
    objects: dict[str, Json] = {}
    for name, value in state.objects.items():
        objects[name] = add_object(name, value, collector, like=like, stand_ins=state.stand_ins)
    if RNG not in objects and (like is None or like.rng):
        # So that restore() finds what it looks for; exports leave it out again.
        collector.start(RNG)
        objects[RNG] = {**capture_rng(collector, devices=()), "added": True}
    for name, aliases in collector.aliases.items():
        objects[name]["aliases"] = aliases
    if state.positions:
        objects[POSITIONS] = state.positions
    return CapturedState(collector.refs, objects, collector.aliases)


def _write(
    pending: Pending,
    file: FileSpec,
    header: bytes,
    tensors: Mapping[str, Tensor],
    stand_ins: StandIns,
) -> FileEntry:
    payload = pending.create_payload(file.name, file.num_bytes)
    stream = PayloadStream(payload)
    stream.write(header)
    entries = {}
    for spec in sorted(file.tensors, key=lambda spec: (spec.offset, spec.num_bytes)):
        data = bytes_of(stand_ins.real(tensors[spec.name]))
        stream.write(data)
        entries[spec.name] = TensorEntry(
            name=spec.name,
            dtype=spec.dtype,
            shape=spec.shape,
            offset=spec.offset,
            num_bytes=spec.num_bytes,
            digest=digest_pieces(data, spec),
            piece_bytes=spec.piece_bytes,
        )
    stream.finish()
    pending.finish_payload(payload, file.num_bytes)
    return FileEntry(
        name=file.name,
        num_bytes=file.num_bytes,
        header_bytes=file.header_bytes,
        header_digest=xxh3_64_hexdigest(header),
        tensors=tuple(entries[spec.name] for spec in file.tensors),
    )


def _manifest(
    step: int, attempt: str, files: tuple[FileEntry, ...], objects: dict[str, Json]
) -> Manifest:
    return Manifest(
        step=step,
        attempt=attempt,
        world=1,
        created_unix_s=time.time(),
        versions={
            "checkfreq": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        files=files,
        objects=objects,
    )
