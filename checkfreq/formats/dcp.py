"""Folders of torch.distributed.checkpoint (DCP), written by its own writer and read by its reader.

DCP's files keep tensors by flat names, and pickle the rest. They turn every key of a dict into
text, and know no other mappings. So one entry more, ``checkfreq``, has what our manifest says, as
text: with it a state comes back exactly as it was. DCP itself ignores it.

A folder's ``.metadata`` is a pickle: see `checkfreq.formats.dcp_metadata`. Values are read by
``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from checkfreq.errors import CheckFreqError, ConfigError, CorruptCheckpointError, storage_errors
from checkfreq.formats.dcp_metadata import metadata_of
from checkfreq.formats.exporting import ChkDir, export, json_of, names_in, read_tensor, saved_in
from checkfreq.formats.importing import Imported, Target, commit, entries_of
from checkfreq.formats.kinds import Ready
from checkfreq.formats.output import new_folder, require_free
from checkfreq.formats.plain import MALFORMED, plain_in, to_plain
from checkfreq.formats.stand_ins import StandIns
from checkfreq.integrations.dcp.chunks import StoredTensor
from checkfreq.integrations.dcp.contents import Contents, contents_of
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.state.capture import GRADIENTS, POSITIONS, RNG
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.saved import SavedObject, new_tensor
from checkfreq.state.saved_tensor import placed
from checkfreq.state.tensors import DTYPES
from checkfreq.store.boxes import Box
from checkfreq.store.fileops import LocalFileOps, user_file, user_path
from checkfreq.types import Json

#: The entry with what DCP's files cannot say.
_OURS = "checkfreq"
_MOST_METADATA_BYTES = 2 << 30


def to_dcp(
    chk_dir: ChkDir,
    folder: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    rank: int = 0,
    overwrite: bool = False,
) -> int:
    """Write a checkpoint as a folder for ``dcp.load``; returns its step.

    The names are those of ``{"model": model.state_dict(), "optimizer": optimizer.state_dict()}``,
    so ``dcp.load`` loads it onto any number of ranks. One process writes it, one tensor at a time.
    Values are as in `to_torch_save`. ``step`` and ``rank`` are those of `checkfreq.load`.

    To load a checkpoint with DCP as it is, there is `checkfreq.integrations.dcp.CFStorageReader`.

    Raises what `checkfreq.load` raises, and ConfigError if ``folder`` is there already.
    """
    target = user_path(folder)
    require_free(target, overwrite=overwrite)

    def write(found: FoundCheckpoint) -> None:
        source = _Source.of(found, rank, path=f"step {found.step} of {chk_dir}")
        with new_folder(target) as made, _own_errors():
            save(
                source.state,
                storage_writer=FileSystemWriter(made),
                planner=_SavePlanner(source),
                no_dist=True,
            )

    return export(chk_dir, step, rank, write)[0].step


@dataclass(slots=True)
class _Source:
    """A checkpoint by DCP's flat names, with stand-ins for tensors and for values."""

    state: dict[str, Any]
    contents: Contents
    stand_ins: StandIns
    description: str
    read: Any

    @classmethod
    def of(cls, found: FoundCheckpoint, rank: int, *, path: str) -> _Source:
        """Describe a checkpoint as ``rank`` sees it."""
        names = names_in(found, rank)
        if _OURS in names:
            raise ConfigError(
                f"{path}: an object called {_OURS!r} cannot be written to a DCP folder, which has "
                "an entry of that name: expected another name. Use to_torch_save"
            )
        manifest = replace(
            found.manifest,
            objects={n: json for n, json in found.manifest.objects.items() if n in names},
        )
        contents = contents_of(manifest, rank=rank, path=path, parameter_names={})
        stand_ins, read = StandIns(), partial(_whole, found)
        state: dict[str, Any] = dict.fromkeys(contents.names)
        for name, stored in contents.tensors.items():
            state[name] = stand_ins.make(stored.shape, stored.dtype, partial(read, stored))
        if GRADIENTS in found.manifest.objects:
            names.append(GRADIENTS)
        saved = [saved_in(found, name, rank, path=path) for name in names]
        flat = _flat_names(contents)
        for one in saved:
            for key, record in one.records.items():
                if (one.name, key) not in flat:
                    name = flat[one.name, key] = f"{_OURS}.{one.name}.{key}"
                    stored = StoredTensor(DTYPES[record.dtype], tuple(record.shape))
                    state[name] = stand_ins.make(
                        stored.shape, stored.dtype, partial(read_tensor, found, record)
                    )
        state[_OURS] = None
        text = json.dumps(_description(found, saved, flat))
        return cls(state, contents, stand_ins, text, read)


def _flat_names(contents: Contents) -> dict[tuple[str, str], str]:
    """DCP's name of a tensor by the object's name and its key there."""
    found: dict[tuple[str, str], str] = {}
    for name, stored in contents.tensors.items():
        chunk = stored.chunks[0]
        owner = chunk.file.name.removesuffix(".safetensors").partition(".")[0]
        found.setdefault((owner, chunk.entry.name), name)
    return found


def _description(
    found: FoundCheckpoint, saved: list[SavedObject], flat: Mapping[tuple[str, str], str]
) -> dict[str, Json]:
    alone = not found.manifest.ranks
    return {
        "step": found.step,
        "objects": {one.name: json_of(one) for one in saved},
        "tensors": {one.name: {key: flat[one.name, key] for key in one.records} for one in saved},
        "positions": found.manifest.objects.get(POSITIONS) if alone else None,
    }


def _whole(found: FoundCheckpoint, stored: StoredTensor) -> Tensor:
    made = stored.empty()
    placements = [
        placed(chunk, Box.whole(chunk.box.sizes), made[_slices(chunk.box)])
        for chunk in stored.chunks
        if chunk.box.num_elements
    ]
    if placements:
        found.reader.read(placements)
    return made


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))


class _SavePlanner(DefaultSavePlanner):
    """Reads each tensor when DCP's writer asks for it. The names are flat already."""

    def __init__(self, source: _Source) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._source = source

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See SavePlanner. The paths of the names, by which DCP nests them again."""
        plans, metadata = super().create_global_plan(all_plans)
        paths = {name: (name,) for name in self._source.state}
        self.metadata = replace(
            metadata, planner_data={**paths, **self._source.contents.planner_data}
        )
        return plans, self.metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """See SavePlanner."""
        name, source = write_item.index.fqn, self._source
        if write_item.type is not WriteItemType.BYTE_IO:
            return source.stand_ins.real(source.state[name])
        value: Any = source.description
        if name != _OURS:
            value = to_plain(source.contents.value(name, source.read), name)
        data = io.BytesIO()
        torch.save(value, data)
        return data


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Raise what DCP has wrapped; it need not warn of a single process, which is meant."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
            yield
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        raise failures[0] from None


# ---- reading


def from_dcp(
    folder: str | os.PathLike[str],
    chk_dir: str | os.PathLike[str],
    *,
    like: CFCheckpoint | None = None,
    names: Mapping[str, str] | None = None,
    step: int | None = None,
    overwrite: bool = False,
) -> int:
    """Make a folder of ``dcp.save`` a checkpoint in ``chk_dir``; returns its step.

    Shards are put together. A folder of `to_dcp` becomes what it was, at its step unless ``step``
    says otherwise. For any other ``like`` and ``names`` are as for `from_torch_save`, and the step
    is 0. One tensor at a time is in memory.

    Raises ConfigError if unpickling what is there would take more than DCP's own classes, tensors
    and plain values, and otherwise as `from_torch_save` does.
    """
    path = user_path(folder)
    with storage_errors(f"reading {path}"), _damage(path):
        reader = _Reader(path)
        kept = reader.values()
        values = dict(zip(kept, plain_in([*kept.values()], str(path)), strict=True))
    if isinstance(text := values.get(_OURS), str):
        state, saved_step = _described(reader, text, like, path=str(path))
        return commit(state, Target(chk_dir, saved_step if step is None else step, like, overwrite))
    stand_ins = StandIns()
    flat = {
        name: values[name] if form is None else _stand_in(reader, name, stand_ins)
        for name, form in reader.forms.items()
    }
    content = _nested(flat, reader.paths, str(path))
    objects = entries_of(content, names=names, like=like, path=str(path))
    return commit(
        Imported(objects, stand_ins=stand_ins), Target(chk_dir, step or 0, like, overwrite)
    )


def _described(
    reader: _Reader, text: str, like: CFCheckpoint | None, *, path: str
) -> tuple[Imported, int]:
    """The state as our description has it."""
    try:
        description = json.loads(text)
        objects, tensors = description["objects"], description["tensors"]
        stand_ins = StandIns()
        found: dict[str, Ready] = {}
        for name, described in objects.items():
            if like is not None and name not in (*like.tracked, RNG, GRADIENTS):
                continue
            own = {key: _stand_in(reader, one, stand_ins) for key, one in tensors[name].items()}
            found[name] = Ready(dict(described), own)
        return Imported(found, description["positions"], stand_ins), description["step"]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            path,
            check=f"entry {_OURS!r}",
            expected="the description that to_dcp wrote, and its tensors",
            got=f"{type(error).__name__}: {error!s:.200}",
        ) from None


def _stand_in(reader: _Reader, name: str, stand_ins: StandIns) -> Tensor:
    form = reader.forms[name]
    if form is None:
        raise ValueError(f"{name!r:.80} is no tensor")
    return stand_ins.make(form.size, form.properties.dtype, partial(reader.tensor, name))


class _Node(dict[Any, Any]):
    """A container that is being put together; a value may be a dict of its own."""


def _nested(flat: Mapping[str, Any], paths: Mapping[str, Any], path: str) -> Any:
    """The state dict that DCP had flattened."""
    root = _Node()
    for name, value in flat.items():
        keys = paths.get(name, (name,))
        node: Any = root
        for key in keys[:-1]:
            node = node.setdefault(key, _Node()) if isinstance(node, _Node) else None
        if not isinstance(node, _Node) or keys[-1] in node:
            raise CorruptCheckpointError(
                path, check="names", expected="a place for each", got=f"{name!r:.80}"
            )
        node[keys[-1]] = value
    return _built(root)


def _built(node: Any) -> Any:
    if not isinstance(node, _Node):
        return node
    if node and all(type(key) is int for key in node) and {*node} == {*range(len(node))}:
        return [_built(node[number]) for number in range(len(node))]
    return {key: _built(value) for key, value in node.items()}


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Tell damage from what needs unpickling, and from errors of the file system."""
    try:
        with _own_errors():
            yield
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error))
        raise ConfigError(
            f"{path} is not read: expected DCP's own classes, tensors and plain values, found what "
            f"needs its author's code, or damage ({reason.strip():.200}). Unpickling can run any "
            "code that the author put there. If you trust it, dcp.load it in a script of yours"
        ) from None
    except CheckFreqError:
        raise
    except (*MALFORMED, AssertionError, EOFError) as error:
        text = f"{type(error).__name__}: {error!s:.200}"
        raise CorruptCheckpointError(
            str(path), check="folder", expected="one of dcp.save", got=text
        ) from None


class _Reader(FileSystemReader):
    """DCP's reader, with a ``.metadata`` that is read once, and as data."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        ops = LocalFileOps(path)
        file = user_file(path / ".metadata")
        self._metadata = metadata_of(ops.read_bytes(file, max_bytes=_MOST_METADATA_BYTES))
        self._require_files(ops)

    def _require_files(self, ops: LocalFileOps) -> None:
        """Raise ValueError unless the parts lie apart in regular files, and hold what they should.

        So what is read is no more than what is there.
        """
        sizes: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            if (file := place.relative_path) not in sizes:
                sizes[file] = ops.file_size(user_file(Path(self.path) / file))
            sizes[file] -= place.length
            if sizes[file] < 0:
                raise ValueError(f"{file!r:.80}: expected parts that the file has room for")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See StorageReader."""
        return self._metadata

    @property
    def forms(self) -> dict[str, TensorStorageMetadata | None]:
        """By flat name, what is known of a tensor; None for a value."""
        return {
            name: one if isinstance(one, TensorStorageMetadata) else None
            for name, one in self._metadata.state_dict_metadata.items()
        }

    @property
    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """By flat name, the keys that lead to it."""
        found: dict[str, tuple[str | int, ...]] = self._metadata.planner_data
        return found

    def values(self) -> dict[str, Any]:
        """What is not a tensor, by flat name."""
        wanted = [name for name, form in self.forms.items() if form is None]
        planner = _LoadPlanner()
        if wanted:
            state: dict[str, Any] = dict.fromkeys(wanted)
            load(state, storage_reader=self, planner=planner, no_dist=True)
        return planner.values

    def tensor(self, name: str) -> Tensor:
        """A tensor, its shards put together."""
        form = self.forms[name]
        assert form is not None
        made = new_tensor(form.size, form.properties.dtype, torch.device("cpu"))
        with storage_errors(f"reading {self.path}"), _damage(Path(self.path)):
            load({name: made}, storage_reader=self, planner=_LoadPlanner(), no_dist=True)
        return made


class _LoadPlanner(DefaultLoadPlanner):
    """Loads by flat names, and values as data."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See LoadPlanner."""
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
