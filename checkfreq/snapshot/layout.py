"""Where each tensor's bytes lie in a slot, which holds the files exactly as they will be written.

There is one safetensors file per object, and one more for what a rank adds to it. A file image is
an 8-byte header length and a JSON header, padded with spaces to a page, then the tensors,
row-major, by decreasing element size, so that each is aligned without gaps, and within one size so
that what is copied together is adjacent: by class, device and number of bytes. Images begin at page
boundaries. A layout serves all later captures of the same structure.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from checkfreq.errors import StateError
from checkfreq.state.collector import CapturedState, TensorRef
from checkfreq.state.tensors import DTYPE_NAMES
from checkfreq.store.digests import piece_bytes_of, piece_bytes_of_shard
from checkfreq.store.manifest import FROZEN_ENDING
from checkfreq.store.parts import file_name, is_frozen_stem, is_stem_of_a_rank, object_of
from checkfreq.types import FileSpec, Json, TensorSpec, round_up_to_page

#: dtype -> its name in a safetensors header, for all that the safetensors library writes. Other
#: dtypes are stored as U8, with the last dimension multiplied by the element size; the manifest has
#: their dtype and shape.
SAFETENSORS_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16",
    "uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float4_e2m1fn_x2": "F4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Shape:
    """What must not change about a tensor for the layout to stay valid."""

    stem: str
    key: str
    dtype: torch.dtype
    shape: torch.Size
    settled: bool

    def is_of(self, ref: TensorRef) -> bool:
        return (
            self.key == ref.key
            and self.shape == ref.tensor.shape
            and self.dtype is ref.tensor.dtype
            and self.settled is ref.settled
            and self.stem == ref.stem
        )


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The images of all files in a slot of ``total_bytes`` (a multiple of the page).

    For every capture that fits, ``destinations[i]`` is (slot offset, bytes) of
    ``captured.tensors[i]``, and ``names[i]`` its name in messages. ``frozen`` are the indices of
    the tensors in ``frozen_files``, which are not expected to change.
    """

    files: tuple[FileSpec, ...]
    total_bytes: int
    destinations: tuple[tuple[int, int], ...]
    names: tuple[str, ...]
    frozen: tuple[int, ...]
    frozen_files: tuple[str, ...]
    _shapes: tuple[_Shape, ...]
    _aliases: dict[str, dict[str, str]]
    _headers: tuple[bytes, ...]

    @classmethod
    def plan(cls, captured: CapturedState) -> StateLayout:
        """Lay out a captured state."""
        files: list[FileSpec] = []
        headers: list[bytes] = []
        destinations = [(0, 0)] * len(captured.tensors)
        end = 0
        numbered = enumerate(captured.tensors)
        # One group per file: the tensors of a file are neighbours in a capture.
        for name, group in groupby(numbered, key=lambda item: item[1].stem):
            aliases, members = captured.aliases.get(name, {}), [*group]
            spec, header = _plan_file(name, [ref for _, ref in members], aliases, slot_offset=end)
            files.append(spec)
            headers.append(header)
            for (index, _), tensor in zip(members, spec.tensors, strict=True):
                destinations[index] = (end + tensor.offset, tensor.num_bytes)
            end += round_up_to_page(spec.num_bytes)
        shapes = tuple(
            _Shape(r.stem, r.key, r.tensor.dtype, r.tensor.shape, r.settled)
            for r in captured.tensors
        )
        # Copied: the layout must not change with the capture.
        aliases_then = {name: dict(names) for name, names in captured.aliases.items()}
        return cls(
            tuple(files),
            end,
            tuple(destinations),
            tuple(f"{object_of(ref.stem)}.{ref.key}" for ref in captured.tensors),
            tuple(i for i, ref in enumerate(captured.tensors) if is_frozen_stem(ref.stem)),
            tuple(file.name for file in files if file.name.endswith(FROZEN_ENDING)),
            shapes,
            aliases_then,
            tuple(headers),
        )

    def fits(self, captured: CapturedState) -> bool:
        """Whether a capture has the same names, dtypes, shapes, classes and aliases."""
        return (
            len(captured.tensors) == len(self._shapes)
            and captured.aliases == self._aliases
            and all(map(_Shape.is_of, self._shapes, captured.tensors))
        )

    def header(self, index: int) -> bytes:
        """The first ``header_bytes`` of ``files[index]``."""
        return self._headers[index]

    def views(self, slot: Tensor) -> list[Tensor]:
        """Typed views into a slot (a 1-d uint8 tensor), one per captured tensor, to copy into."""
        found = []
        for (offset, num_bytes), shape in zip(self.destinations, self._shapes, strict=True):
            data = slot[offset : offset + num_bytes]
            found.append(data.view(shape.dtype).view(shape.shape))
        return found


def _plan_file(
    name: str, refs: list[TensorRef], aliases: dict[str, str], *, slot_offset: int
) -> tuple[FileSpec, bytes]:
    """One object's file and its header, which list the tensors in the order of ``refs``."""
    begins, end = [0] * len(refs), 0
    for index in sorted(range(len(refs)), key=lambda index: _position(refs[index])):
        begins[index] = end
        end += refs[index].tensor.nbytes
    header = _header(refs, begins, aliases)
    tensors = tuple(
        _tensor_spec(ref, len(header) + begin) for ref, begin in zip(refs, begins, strict=True)
    )
    return FileSpec(file_name(name), slot_offset, len(header) + end, len(header), tensors), header


def _position(ref: TensorRef) -> tuple[int, bool, str, int]:
    tensor = ref.tensor
    return -tensor.element_size(), ref.settled, str(tensor.device), tensor.nbytes


def _tensor_spec(ref: TensorRef, offset: int) -> TensorSpec:
    tensor = ref.tensor
    num_bytes = tensor.numel() * tensor.element_size()
    shape = tuple(tensor.shape)
    pieces = (
        piece_bytes_of_shard(shape, num_bytes)
        if is_stem_of_a_rank(ref.stem)
        else piece_bytes_of(num_bytes)
    )
    return TensorSpec(ref.key, DTYPE_NAMES[tensor.dtype], shape, offset, num_bytes, pieces)


def _header(refs: list[TensorRef], begins: list[int], aliases: dict[str, str]) -> bytes:
    entries: dict[str, Json] = {"__metadata__": {"format": "pt", **_alias_metadata(aliases)}}
    for ref, begin in zip(refs, begins, strict=True):
        num_bytes = ref.tensor.numel() * ref.tensor.element_size()
        dtype, shape = safetensors_form(ref.tensor.dtype, ref.tensor.shape)
        entries[ref.key] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [begin, begin + num_bytes],
        }
    try:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        wrong = error.object[error.start : error.end]
        raise StateError(f"a tensor's name has {wrong!a}, which UTF-8 has not; rename it") from None
    length = round_up_to_page(8 + len(text)) - 8
    return struct.pack("<Q", length) + text.ljust(length)


def _alias_metadata(aliases: dict[str, str]) -> dict[str, str]:
    return {"aliases": json.dumps(aliases, ensure_ascii=False)} if aliases else {}


def safetensors_form(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """Name of the dtype, and the shape, that a safetensors header has for a tensor."""
    name = SAFETENSORS_NAMES.get(DTYPE_NAMES[dtype])
    if name == "F4" and shape:  # counts halves of bytes, and torch the bytes
        return name, [*shape[:-1], 2 * shape[-1]]
    if name not in (None, "F4"):
        return name, list(shape)
    return "U8", [*shape[:-1], math.prod(shape[-1:]) * dtype.itemsize]
