"""The tensors of one object in a checkpoint, in the chunks in which its ranks wrote them.

As one rank sees them: replicated tensors, all shards of sharded ones, and of those that differ
between ranks its own, or the first rank's if the checkpoint has no such rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from checkfreq.errors import ConfigError, CorruptCheckpointError, StateError
from checkfreq.state.saved_tensor import Chunk
from checkfreq.state.tensors import DTYPES
from checkfreq.store.boxes import Box
from checkfreq.store.manifest import FileEntry, Manifest, TensorEntry
from checkfreq.store.parts import shared_files_of, stem_of
from checkfreq.types import Json


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk: its whole shape, and the chunks that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)

    def empty(self) -> Tensor:
        """An uninitialised tensor for all of it; StateError if there is no memory."""
        try:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        except RuntimeError as error:
            raise StateError(f"no memory for a tensor of {list(self.shape)}: {error}") from None


def own_json(manifest: Manifest, name: str, rank: int) -> dict[str, Json]:
    """The JSON that one rank added to an object; {} if none."""
    found: dict[str, Json] = manifest.ranks.get(rank, {}).get(name, {})
    return found


def rank_for(manifest: Manifest, rank: int) -> int:
    """The rank whose own state a reader of rank ``rank`` gets."""
    return rank if rank in manifest.ranks else min(manifest.ranks, default=0)


def tensors_of(
    manifest: Manifest, name: str, *, rank: int | None, path: str
) -> dict[str, StoredTensor]:
    """The tensors of an object by key, as ``rank`` sees them; None: those of all ranks.

    ``path`` is the manifest's, for messages. Raises CorruptCheckpointError if the chunks do not
    make up the whole tensor.
    """
    files = {file.name: file for file in manifest.files}
    found: dict[str, StoredTensor] = {}
    for key, shape, chunk in _chunks(manifest, name, files, rank):
        entry = chunk.entry
        if entry.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise CorruptCheckpointError(
                path, check=f"dtype of {name}.{key}", expected=f"one of {known}", got=entry.dtype
            )
        whole = found.setdefault(key, StoredTensor(DTYPES[entry.dtype], shape))
        if (whole.dtype, whole.shape) != (DTYPES[entry.dtype], shape):
            expected, got = f"{whole.dtype} {whole.shape}", f"{entry.dtype} {shape}"
            check = f"shards of {name}.{key}"
            raise CorruptCheckpointError(path, check=check, expected=expected, got=got)
        whole.chunks.append(chunk)
    for key, tensor in found.items():
        _require_whole(tensor, f"{name}.{key}", manifest, path)
    return found


_KeyedChunk = tuple[str, tuple[int, ...], Chunk]


def _chunks(
    manifest: Manifest, name: str, files: Mapping[str, FileEntry], rank: int | None
) -> Iterator[_KeyedChunk]:
    """Tuples of key, whole shape and chunk. Tensors that differ between ranks come last."""
    own: dict[str, _KeyedChunk] = {}
    json = manifest.objects.get(name, {})
    for shared in (files[one] for one in shared_files_of(name) if one in files):
        own.update((e.name, _chunk(shared, e, json)) for e in shared.tensors)
    for number in sorted(manifest.ranks):
        file = files.get(f"{stem_of(name, number)}.safetensors")
        if file is None:
            continue
        json = own_json(manifest, name, number)
        for entry in file.tensors:
            if entry.name in json.get("shards", {}):
                yield _chunk(file, entry, json)
            elif rank is None or number == rank_for(manifest, rank):
                own[entry.name] = _chunk(file, entry, json)
    yield from own.values()


def _chunk(file: FileEntry, entry: TensorEntry, json: Mapping[str, Json]) -> _KeyedChunk:
    size = tuple(entry.shape)
    key = json.get("pieces", {}).get(entry.name, entry.name)
    shape, offsets = json.get("shards", {}).get(entry.name, (size, (0,) * len(size)))
    return key, tuple(shape), Chunk(Box(tuple(offsets), size), file, entry)


def _require_whole(tensor: StoredTensor, name: str, manifest: Manifest, path: str) -> None:
    """Refuse a gap: DCP reads the chunks that overlap and would leave the rest as it was."""
    boxes = [chunk.box for chunk in tensor.chunks]
    covered = sum(box.num_elements for box in boxes)
    if covered == math.prod(tensor.shape) and all(box.lies_in(tensor.shape) for box in boxes):
        return
    if manifest.ranks and len(manifest.ranks) < manifest.world:
        there = ", ".join(map(str, sorted(manifest.ranks)))
        raise ConfigError(
            f"{path} holds only the parts of ranks {there} of {manifest.world}, and {name} is "
            "sharded over all: with Directory.NODE_LOCAL only CFManager.restore puts them together"
        )
    got = ", ".join(f"{list(box.sizes)} at {list(box.offsets)}" for box in boxes[:8])
    expected = f"all of {list(tensor.shape)}"
    raise CorruptCheckpointError(path, check=f"shards of {name}", expected=expected, got=got)
