"""Folders of ``save_pretrained``: the weights of one module, in safetensors files with an index.

::

    folder/
        model.safetensors                     if the weights fit into one file; else
        model-00001-of-00003.safetensors ...
        model.safetensors.index.json          which tensor is in which of them
        config.json, tokenizer.json, ...      not ours: left as they are, or copied

Of tied weights one name is written, as transformers does; it ties the others when it loads.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from checkfreq.errors import ConfigError, CorruptCheckpointError, storage_errors
from checkfreq.formats.exporting import ChkDir, chosen, export, read_tensor, saved_in
from checkfreq.formats.importing import Imported, Target, commit
from checkfreq.formats.output import new_folder
from checkfreq.formats.safetensors_file import Form, SafetensorsFile, write_tensors
from checkfreq.formats.single_file import forms_of
from checkfreq.formats.stand_ins import StandIns
from checkfreq.helpers.saving import write_atomically
from checkfreq.helpers.stream import PayloadStream
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.saved import SavedObject
from checkfreq.store.fileops import Kind, LocalFileOps, user_file, user_path
from checkfreq.types import Json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_METADATA = {"format": "pt"}
#: Files with weights, which are never copied.
_WEIGHTS = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth"),
    *(".h5", ".msgpack", ".gguf", ".ckpt"),
)
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_MOST_INDEX_BYTES = 256 << 20
_COPY_BYTES = 8 << 20


def to_pretrained(
    chk_dir: ChkDir,
    folder: str | os.PathLike[str],
    *,
    name: str | None = None,
    step: int | str | None = None,
    beside: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    rank: int = 0,
    overwrite: bool = False,
) -> int:
    """Write a module's weights as ``save_pretrained`` does; returns the checkpoint's step.

    ``name``: which module; None for the only one. ``beside``: a folder whose other files (config,
    tokenizer) are copied. Files without weights that are in ``folder`` already stay. One tensor at
    a time is in memory; files have up to ``max_shard_bytes`` of tensors.

    Raises what `checkfreq.load` raises, and ConfigError if ``folder`` has weights already, and for
    an object that is no module, or whose state is more than tensors with names in safetensors.
    """
    target = user_path(folder)
    _require_no_weights(target, overwrite=overwrite)

    def write(found: FoundCheckpoint) -> None:
        where = f"step {found.step} of {chk_dir}"
        saved = saved_in(found, chosen(found, name, rank, path=where), rank, path=where)
        _require_weights_alone(saved)
        with new_folder(target) as made:
            for source in (target, beside):
                _copy_others(None if source is None else user_path(source), made)
            _write(made, found, saved, max_shard_bytes)

    return export(chk_dir, step, rank, write)[0].step


def _require_no_weights(folder: Path, *, overwrite: bool) -> None:
    with storage_errors(f"looking at {folder}"):
        kinds = _scan(folder)
        if LocalFileOps(folder.parent).kind(folder) not in (None, Kind.DIRECTORY):
            raise ConfigError(f"{folder}: expected a folder, or nothing; found something else")
    if others := [one for one, kind in kinds.items() if kind is not Kind.FILE]:
        raise ConfigError(
            f"{folder} holds {', '.join(others):.200}: expected files alone. Pass a new folder, "
            "and beside= for the files to copy"
        )
    if (there := [one for one in kinds if one.endswith(_WEIGHTS)]) and not overwrite:
        raise ConfigError(
            f"{folder} holds weights already ({', '.join(there):.200}): expected none. Pass "
            "another folder, or overwrite=True"
        )


def _require_weights_alone(saved: SavedObject) -> None:
    kind = saved.field("kind")
    if kind != "module":
        raise ConfigError(f"{saved.path}: {saved.name} is of kind {kind}: expected a module")
    unnamed = [form.name for form in forms_of(saved) if not form.is_named]
    if odd := [*saved.field("extra", {}), *unnamed]:
        raise ConfigError(
            f"{saved.path}: {saved.name} holds {', '.join(odd):.200}: expected tensors of dtypes "
            "that safetensors has a name for, and nothing else. Use to_torch_save or "
            "to_safetensors, which keep all of it"
        )
    for key in saved.records:
        saved.require(key)


def _scan(folder: Path) -> dict[str, Kind]:
    ops = LocalFileOps(folder)
    try:
        return dict(ops.scan(folder))
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _copy_others(source: Path | None, folder: Path) -> None:
    """Copy the files that hold no weights; a later source wins."""
    for one, kind in ({} if source is None else _scan(source)).items():
        if kind is Kind.FILE and not one.endswith(_WEIGHTS):
            assert source is not None
            _copy(source / one, folder / one)


def _copy(source: Path, target: Path) -> None:
    def write(stream: PayloadStream) -> None:
        with contextlib.closing(LocalFileOps(source.parent).open_for_read(source)) as file:
            buffer = memoryview(mmap.mmap(-1, _COPY_BYTES))
            for start in range(0, file.size, _COPY_BYTES):
                stream.write(buffer[: file.preadinto(buffer, start)])

    write_atomically(target, write, what=f"copying {source}")


def _write(folder: Path, found: FoundCheckpoint, saved: SavedObject, most: int) -> None:
    def read(key: str) -> Tensor:
        return read_tensor(found, saved.record(key))

    forms = forms_of(saved)
    shards = _shards(forms, most)
    if len(shards) == 1:
        _write_shard(folder / _SINGLE, shards[0], read)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, shard, read)
        weight_map.update((form.name, file) for form in shard)
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(form.shape) for form in forms),
            "total_size": sum(form.num_bytes for form in forms),
        },
        "weight_map": dict(sorted(weight_map.items())),
    }
    text = f"{json.dumps(index, indent=2)}\n".encode()
    LocalFileOps(folder).replace_file(folder / _INDEX, text)


def _write_shard(path: Path, forms: Iterable[Form], read: object) -> None:
    write_atomically(
        path,
        lambda stream: write_tensors(stream, forms, read, metadata=_METADATA),  # type: ignore[arg-type]
        what=f"writing {path}",
    )


def _shards(forms: Sequence[Form], most: int) -> list[list[Form]]:
    """In order, as many tensors to a file as fit; one that is larger has a file of its own."""
    if most < 1:
        raise ConfigError(f"max_shard_bytes={most}: expected at least 1")
    shards: list[list[Form]] = [[]]
    filled = 0
    for form in forms:
        if shards[-1] and filled + form.num_bytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(form)
        filled += form.num_bytes
    return shards


def from_pretrained(
    folder: str | os.PathLike[str],
    chk_dir: str | os.PathLike[str],
    *,
    name: str = "model",
    like: CFCheckpoint | None = None,
    step: int = 0,
    overwrite: bool = False,
) -> int:
    """Make the weights in a folder of ``save_pretrained`` a checkpoint; returns the step.

    They become the module ``name``. Pass ``like``, the CFCheckpoint that will restore it, for a
    model with tied weights: the folder has one name of each, and only the live model shows the
    others. Safetensors files alone are read; ``pytorch_model.bin`` is refused, since it is pickled.

    Raises as `from_torch_save` does.
    """
    source = user_path(folder)
    stand_ins = StandIns()
    tensors: dict[str, Tensor] = {}
    for file in _files(source):
        tensors |= file.stand_ins(stand_ins)
    return commit(
        Imported({name: tensors}, stand_ins=stand_ins), Target(chk_dir, step, like, overwrite)
    )


def _files(folder: Path) -> list[SafetensorsFile]:
    with storage_errors(f"reading {folder}"):
        kinds = _scan(folder)
        if _INDEX in kinds:
            return _indexed(folder, LocalFileOps(folder))
        if _SINGLE in kinds:
            return [SafetensorsFile.open(folder / _SINGLE)]
    if pickled := [one for one in _PICKLED if one in kinds]:
        raise ConfigError(
            f"{folder} has its weights in {pickled[0]}, which is pickled: expected {_SINGLE} or "
            f"{_INDEX}. Write them with save_pretrained(safe_serialization=True), or import that "
            "file with from_torch_save"
        )
    raise ConfigError(f"{folder}: expected {_SINGLE} or {_INDEX}, found neither")


def _indexed(folder: Path, ops: LocalFileOps) -> list[SafetensorsFile]:
    path = folder / _INDEX
    weight_map = _weight_map(path, ops.read_bytes(user_file(path), max_bytes=_MOST_INDEX_BYTES))
    named: dict[str, set[str]] = {}
    for key, where in weight_map.items():
        named.setdefault(where, set()).add(key)
    files = []
    for one, keys in named.items():
        if not one.endswith(".safetensors") or "/" in one or one.startswith("."):
            raise _corrupt(path, "name of a file", "one in this folder", one)
        if not ops.exists(folder / one):
            raise _corrupt(path, "files", "all that it names", f"no {one}")
        file = SafetensorsFile.open(folder / one)
        if differing := sorted(keys ^ file.forms.keys()):
            raise _corrupt(path, f"tensors of {one}", "those in the index", differing[:4])
        files.append(file)
    return files


def _weight_map(path: Path, data: bytes) -> dict[str, str]:
    try:
        found: Json = json.loads(data.decode())["weight_map"]
        if not all(isinstance(where, str) for where in found.values()):
            raise ValueError("expected names of files")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _corrupt(path, "index", "a weight_map", f"{type(error).__name__}") from None
    return dict(found)


def _corrupt(path: Path, check: str, expected: object, got: object) -> CorruptCheckpointError:
    return CorruptCheckpointError(str(path), check=check, expected=expected, got=got)
