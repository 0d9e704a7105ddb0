"""Safetensors files: an 8-byte length, a JSON header, and the tensors one after another.

A file is untrusted input: sizes are bounded before they are used, and the tensors must cover the
rest of the file without gaps or overlaps. What the safetensors library refuses is refused, and a
header that repeats a name or has fields of its own too. The format has no digests: damage inside of
a tensor cannot be seen.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from checkfreq.errors import CorruptCheckpointError, storage_errors
from checkfreq.formats.stand_ins import StandIns, bytes_of
from checkfreq.helpers.stream import PayloadStream
from checkfreq.snapshot.layout import SAFETENSORS_NAMES, safetensors_form
from checkfreq.state.tensors import DTYPES, sizes_of
from checkfreq.store.fileops import LocalFileOps, user_file
from checkfreq.types import PAGE_BYTES, Json, round_up_to_page

_DTYPES = {name: DTYPES[ours] for ours, name in SAFETENSORS_NAMES.items() if ours in DTYPES}
#: The most that the safetensors library reads.
_MOST_HEADER_BYTES = 100_000_000
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Form:
    """What is known of a tensor before it is read."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_named(self) -> bool:
        """Whether safetensors has a name for its dtype; otherwise it is written as bytes."""
        return self.dtype is torch.uint8 or safetensors_form(self.dtype, self.shape)[0] != "U8"


def write_tensors(
    stream: PayloadStream,
    forms: Iterable[Form],
    read: Callable[[str], Tensor],
    *,
    metadata: Mapping[str, str],
) -> None:
    """Write a file with these tensors, of which one at a time is read.

    They are ordered by decreasing element size, so that each is aligned.
    """
    ordered = sorted(forms, key=lambda form: -form.dtype.itemsize)
    header: dict[str, Json] = {"__metadata__": dict(metadata)}
    end = 0
    for form in ordered:
        begin, end = end, end + form.num_bytes
        dtype, shape = safetensors_form(form.dtype, form.shape)
        header[form.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    stream.write(struct.pack("<Q", len(text)) + text)
    for form in ordered:
        stream.write(bytes_of(read(form.name)))


@dataclass(slots=True)
class SafetensorsFile:
    """The header of a file, checked; tensors are read when they are asked for."""

    path: Path
    forms: dict[str, Form] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    _begins: dict[str, int] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Read the header. Raises CorruptCheckpointError, StorageError, ConfigError for a FIFO."""
        path = user_file(path)
        file = cls(path)
        with storage_errors(f"reading {path}"):
            size = LocalFileOps(path.parent).file_size(path)
            if size < 8:
                raise file._corrupt("size in bytes", "at least 8", size)
            (length,) = struct.unpack("<Q", file._bytes(0, 8))
            if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
                raise file._corrupt("length of the header", "one that fits the file", length)
            file._parse(bytes(file._bytes(8, 8 + length)), 8 + length, size)
        return file

    def stand_ins(self, made_by: StandIns) -> dict[str, Tensor]:
        """The tensors by name, of which each is read when it is needed."""
        return {
            name: made_by.make(form.shape, form.dtype, partial(self.read, name))
            for name, form in self.forms.items()
        }

    def read(self, name: str) -> Tensor:
        """A tensor, with memory of its own."""
        form, begin = self.forms[name], self._begins[name]
        if not form.num_bytes:
            return torch.empty(form.shape, dtype=form.dtype, device="cpu")
        with storage_errors(f"reading {self.path}"):
            data = self._bytes(begin, begin + form.num_bytes)
        flat = torch.frombuffer(data, dtype=torch.uint8)
        if begin % form.dtype.itemsize:
            flat = flat.clone()
        return flat.view(form.dtype).reshape(form.shape)

    def _bytes(self, start: int, end: int) -> memoryview:
        """The bytes from ``start`` to ``end``, by whole pages for direct I/O.

        Small ones come through the page cache: one access to the disk each would take longer.
        """
        first = start // PAGE_BYTES * PAGE_BYTES
        buffer = memoryview(mmap.mmap(-1, round_up_to_page(end - first)))
        ops = LocalFileOps(self.path.parent, direct=end - start > _SMALL_BYTES)
        file = ops.open_for_read(self.path)
        try:
            got = file.preadinto(buffer, first)
        finally:
            file.close()
        if got < end - first:
            raise self._corrupt("size in bytes", f"at least {end}", first + got)
        return buffer[start - first : end - first]

    def _parse(self, text: bytes, begin: int, size: int) -> None:
        try:
            header = _strict_json(text)
            metadata = header.pop("__metadata__", {})
            if not all(isinstance(one, str) for one in metadata.values()):
                raise ValueError("expected texts as metadata")
            "".join((*header, *metadata, *metadata.values())).encode()  # no lone surrogates
            self.metadata = dict(metadata)
            spans = [self._add(name, entry, begin) for name, entry in header.items()]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            text_of = f"{type(error).__name__}: {error!s:.200}"
            raise self._corrupt("header", "that of a safetensors file", text_of) from None
        end = begin
        for start, stop in sorted(spans):
            if start != end:
                raise self._corrupt("place of a tensor", f"byte {end}", start)
            end = stop
        if end != size:
            raise self._corrupt("size in bytes", end, size)

    def _add(self, name: str, entry: Any, begin: int) -> tuple[int, int]:
        if set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{name!r:.80}: expected dtype, shape and data_offsets")
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name!r:.80}: unknown dtype {entry['dtype']!r:.40}")
        dtype, shape = _DTYPES[entry["dtype"]], sizes_of(entry["shape"])
        if entry["dtype"] == "F4":  # counts halves of bytes, and torch the bytes
            if not shape or shape[-1] % 2:
                raise ValueError(f"{name!r:.80}: expected an even number of F4 in a row")
            shape = (*shape[:-1], shape[-1] // 2)
        form = Form(name, dtype, shape)
        first, last = sizes_of(entry["data_offsets"])
        if last - first != form.num_bytes:
            raise ValueError(f"{name!r:.80}: {last - first} bytes for {form.num_bytes}")
        self.forms[name], self._begins[name] = form, begin + first
        return begin + first, begin + last

    def _corrupt(self, check: str, expected: object, got: object) -> CorruptCheckpointError:
        return CorruptCheckpointError(str(self.path), check=check, expected=expected, got=got)


def _strict_json(text: bytes) -> Any:
    """JSON as the safetensors library reads it, in UTF-8 and with whole numbers alone."""
    return json.loads(
        text.decode(),
        object_pairs_hook=_unique,
        parse_int=_whole,
        parse_float=_no_number,
        parse_constant=_no_number,
    )


def _whole(text: str) -> int:
    return _no_number(text) if text.startswith("-") else int(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"expected whole numbers from 0, got {text:.40}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found
