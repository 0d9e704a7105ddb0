"""A digest of a few samples, to notice data that was split or shuffled without a seed.

No sample is asked for: that would draw, open files before the workers are forked, or take seconds.
Read is what a dataset holds in memory with one entry for each sample: its tensors, arrays, lists
and tables, those of datasets inside it, and the rows of a ``datasets.Dataset``. Left out is what
may differ between two machines with the same data: the folders of paths, and of floating-point
numbers all but sign and magnitude, of which a few may differ too.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset

from iterators.order.fingerprint import attribute, length_or_none

logger = logging.getLogger(__name__)

#: Samples that are looked at, evenly spread; elements of each; parts of a dataset; nested ones.
_ROWS, _ELEMENTS, _PARTS, _DEPTH = 64, 16, 8, 4
#: Bytes of stored rows that are read, about; characters or bytes at either end of a text.
_BYTES, _ENDS = 1 << 22, 1 << 11
#: Groups of floating-point numbers, each with a digest of its own.
_GROUPS = 5
#: Binary orders of magnitude below the largest number from which a number counts as 0.
_RANGE = 20


def sample_digests(dataset: object, fingerprint: str | None = None) -> dict[str, str]:
    """By the place of each part of ``dataset``, a digest of what it holds of a few samples.

    Empty if the user or the dataset says what the data is, see ``dataset_fingerprint``.
    """
    if fingerprint is not None or callable(attribute(dataset, "data_fingerprint")):
        return {}
    found: dict[str, str] = {}
    try:
        for place, rows in _parts(dataset, type(dataset).__name__, _DEPTH):
            if any(row is None for row in rows):  # a cache
                continue
            digest = _digest(rows)
            if len(found) < _PARTS and digest != _digest(rows[:1] * len(rows)):  # an empty cache
                found[place] = digest
    except Exception:  # code of the data's own
        logger.debug("not all of the data can be looked at", exc_info=True)
    return found


def _digest(rows: list[Any]) -> str:
    """A digest of all but floating-point numbers, and those of groups of these."""
    floats: list[NDArray[np.float64]] = []
    exact = b"".join(_encoded(rows, 2, floats))
    groups = np.array_split(_coarse(np.concatenate(floats)), _GROUPS) if floats else []
    return ".".join([_hex(exact, 4), *(_hex(group.tobytes(), 2) for group in groups)])


def _hex(content: bytes, size: int) -> str:
    return blake2b(content, digest_size=size).hexdigest()


def _parts(dataset: Any, place: str, depth: int) -> Iterator[tuple[str, list[Any]]]:
    """Places in ``dataset`` that hold something of each sample, and that of a few samples."""
    n = length_or_none(dataset)
    if not n or not depth or isinstance(dataset, IterableDataset):
        return
    if _is_stored(dataset):
        table = dataset.data
        # A power of two: the same number for tables whose sizes differ a little by their layout.
        fitting = _BYTES * table.num_rows // max(1, table.nbytes)
        most = min(_ROWS, 1 << max(0, fitting.bit_length() - 1))
        order = attribute(dataset, "_indices")
        places = _spread(n, most)
        if order is not None:
            places = [order.fast_slice(i, 1).column(0)[0].as_py() for i in places]
        picked = [table.fast_slice(i, 1).to_pydict() for i in places]
        for name in dataset.column_names:
            yield f"{place}[{name!r}]", [row[name][0] for row in picked]
        return
    if isinstance(dataset, list | tuple):
        yield place, [dataset[i] for i in _spread(n)]
        return
    for name, value in getattr(dataset, "__dict__", {}).items():
        yield from _inside(value, n, f"{place}.{name}", depth)


def _inside(value: Any, n: int, place: str, depth: int) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(value, Dataset) or _is_stored(value):
        yield from _parts(value, place, depth - 1)
    elif _has_rows(value, n):
        if _is_table(value):
            yield place, value.iloc[_spread(n)].to_numpy().tolist()
        else:
            yield place, [value[i] for i in _spread(n)]
    elif depth and isinstance(value, list | tuple | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in islice(items, _PARTS):
            yield from _inside(one, n, f"{place}[{key!r}]", 0)


def _is_stored(value: object) -> bool:
    """Whether this is a ``datasets.Dataset``, which has rows in a table."""
    kind = getattr(sys.modules.get("datasets.arrow_dataset"), "Dataset", None)
    return kind is not None and isinstance(value, kind)


def _is_table(value: object) -> bool:
    """Whether this is a table or column of pandas: others may have a length only when computed."""
    pandas = sys.modules.get("pandas")
    kinds = (getattr(pandas, "DataFrame", None), getattr(pandas, "Series", None))
    return any(kind is not None and isinstance(value, kind) for kind in kinds)


def _has_rows(value: Any, n: int) -> bool:
    if isinstance(value, torch.Tensor) and not _is_plain(value):
        return False
    if isinstance(value, torch.Tensor | np.ndarray):
        return bool(value.ndim) and len(value) == n
    return (isinstance(value, list | tuple) or _is_table(value)) and len(value) == n


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
    )


def _spread(n: int, most: int = _ROWS) -> list[int]:
    return [i * (n - 1) // max(1, min(n, most) - 1) for i in range(min(n, most))]


def _encoded(rows: Iterable[Any], depth: int, floats: list[NDArray[Any]]) -> Iterator[bytes]:
    """Bytes that tell the rows apart; floating-point numbers are added to ``floats`` instead."""
    for row in rows:
        numbers = _numbers(row)
        if numbers is not None and numbers.dtype.kind == "f":
            floats.append(numbers)
            yield f"{numbers.size}".encode()
        elif numbers is not None:
            yield numbers.tobytes()
        elif isinstance(row, str | os.PathLike):
            name = os.fspath(row).rpartition("/")[2]
            yield (name[:_ENDS] + name[-_ENDS:]).encode(errors="surrogatepass")
        elif isinstance(row, bytes | bytearray):
            yield bytes(row[:_ENDS] + row[-_ENDS:])
        elif isinstance(row, date):  # pandas' times are
            yield str(row).encode()
        elif isinstance(row, Mapping) and depth:
            keys = sorted(row, key=str)[:_ELEMENTS]  # a set's order may have made the row's
            yield from _encoded([*keys, *(row[key] for key in keys)], depth - 1, floats)
        elif isinstance(row, list | tuple) and depth:
            picked = [row[i] for i in _spread(len(row), _ELEMENTS)]
            yield from _encoded([len(row), *picked], depth - 1, floats)
        elif dataclasses.is_dataclass(row) and depth:
            values = [getattr(row, one.name, None) for one in dataclasses.fields(row)]
            yield from _encoded(values[:_ELEMENTS], depth - 1, floats)
        else:
            yield type(row).__qualname__.encode()
        yield b"\0"


def _numbers(row: Any) -> NDArray[Any] | None:
    """Some elements of an array, or a number; ``[N] int64`` or ``float64``, or None."""
    if isinstance(row, torch.Tensor) and _is_plain(row):
        flat = row.detach().reshape(-1)
        flat = flat[_spread(len(flat), _ELEMENTS)].cpu().resolve_conj().resolve_neg()
        found: NDArray[Any] = (flat.double() if flat.is_floating_point() else flat).numpy()
    elif isinstance(row, np.ndarray | np.generic | float | int):
        found = np.asarray(row).reshape(-1)
        found = found[_spread(len(found), _ELEMENTS)]
    else:
        return None
    if found.dtype.kind in "biumM":
        return found.astype("<i8")
    if found.dtype.kind == "c":
        found = np.concatenate([found.real, found.imag])
    return found.astype("<f8") if found.dtype.kind == "f" else None


def _coarse(values: NDArray[np.float64]) -> NDArray[np.int16]:
    """``[N, 2]``: signs and orders of magnitude. The middle of one is a power of 2, as data has."""
    with np.errstate(all="ignore"):
        order = np.rint(np.log2(np.abs(values)))
    order[~np.isfinite(values)] = 2000
    largest = order[np.isfinite(values)].max(initial=-np.inf)
    order = np.where(order < largest - _RANGE, -2000, order)
    signs = np.where(order == -2000, 0, np.sign(np.nan_to_num(values)))
    return np.stack([np.nan_to_num(order, neginf=-2000), signs], axis=1).astype("<i2")
