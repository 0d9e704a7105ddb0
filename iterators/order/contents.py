"""A digest of a few samples, to notice data that was split or shuffled without a seed.

No sample is asked for: that would draw, open files before the workers are forked, or take seconds.
Read is what a dataset holds in memory with one entry for each sample: its tensors, arrays, lists
and tables, those of datasets inside it, and the stored rows of a ``datasets.Dataset``. Left out is
what may differ between two machines with the same data: the folders of paths, and of floating-point
numbers all but sign and magnitude.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset

from iterators.order.fingerprint import length_or_none

#: Samples that are looked at, evenly spread; elements of each; parts of a dataset; nested ones.
_ROWS, _ELEMENTS, _PARTS, _DEPTH = 64, 16, 8, 4
#: Bytes of stored rows that are read, about.
_BYTES = 1 << 26
#: Binary orders of magnitude below the largest number from which a number counts as 0.
_RANGE = 20


def sample_digests(dataset: object, fingerprint: str | None = None) -> dict[str, str]:
    """By the place of each part of ``dataset``, a digest of what it holds of a few samples.

    Empty if the user or the dataset says what the data is, see ``dataset_fingerprint``.
    """
    if fingerprint is not None or callable(getattr(dataset, "data_fingerprint", None)):
        return {}
    found: dict[str, str] = {}
    for place, rows in _parts(dataset, type(dataset).__name__, _DEPTH):
        if len(found) < _PARTS and not any(row is None for row in rows):  # a cache
            found[place] = blake2b(b"".join(_encoded(rows, 2)), digest_size=4).hexdigest()
    return found


def _parts(dataset: Any, place: str, depth: int) -> Iterator[tuple[str, list[Any]]]:
    """Places in ``dataset`` that hold something of each sample, and that of a few samples."""
    n = length_or_none(dataset)
    if not n or not depth or isinstance(dataset, IterableDataset):
        return
    if _is_stored(dataset):
        table = dataset.data
        most = max(1, min(_ROWS, _BYTES * table.num_rows // max(1, table.nbytes)))
        picked = [table.fast_slice(i, 1).to_pydict() for i in _spread(table.num_rows, most)]
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
        if hasattr(value, "iloc"):  # pandas
            yield place, value.iloc[_spread(n)].to_numpy().tolist()
        else:
            yield place, [value[i] for i in _spread(n)]
    elif depth and isinstance(value, list | tuple | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in list(items)[:_PARTS]:
            yield from _inside(one, n, f"{place}[{key!r}]", 0)


def _is_stored(value: object) -> bool:
    """Whether this is a ``datasets.Dataset``, which has rows in a table."""
    kind = getattr(sys.modules.get("datasets.arrow_dataset"), "Dataset", None)
    return kind is not None and isinstance(value, kind)


def _has_rows(value: Any, n: int) -> bool:
    if isinstance(value, torch.Tensor) and not _is_plain(value):
        return False
    if isinstance(value, torch.Tensor | np.ndarray):
        return bool(value.ndim) and len(value) == n
    return (isinstance(value, list | tuple) or hasattr(value, "iloc")) and len(value) == n


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
    )


def _spread(n: int, most: int = _ROWS) -> list[int]:
    return [i * (n - 1) // max(1, min(n, most) - 1) for i in range(min(n, most))]


def _encoded(rows: list[Any], depth: int) -> Iterator[bytes]:
    """Bytes that tell the rows apart. Numbers of all of them together, for their magnitudes."""
    numbers = [_numbers(row) for row in rows]
    arrays = [one for one in numbers if one is not None]
    yield f"{len(rows)}:{[one.size for one in arrays]}".encode()
    if arrays:
        together = np.concatenate(arrays)
        yield _coarse(together) if together.dtype.kind == "f" else together.tobytes()
    for row in (row for row, found in zip(rows, numbers, strict=True) if found is None):
        if isinstance(row, str | os.PathLike):
            yield os.fspath(row).rpartition("/")[2].encode(errors="surrogatepass")
        elif isinstance(row, bytes):
            yield row
        elif isinstance(row, Mapping) and depth:
            keys = sorted(row, key=str)[:_ELEMENTS]  # a set's order may have made the row's
            yield from _encoded([*keys, *(row[key] for key in keys)], depth - 1)
        elif isinstance(row, list | tuple) and depth:
            yield from _encoded([row[i] for i in _spread(len(row), _ELEMENTS)], depth - 1)
        else:
            yield type(row).__qualname__.encode()
        yield b"\0"


def _numbers(row: Any) -> NDArray[Any] | None:
    """Some elements of an array, or a number; ``[N] int64`` or ``float64``, or None."""
    if isinstance(row, torch.Tensor) and _is_plain(row) and not row.is_complex():
        flat = row.detach().reshape(-1)
        flat = flat[_spread(len(flat), _ELEMENTS)].cpu()
        found: NDArray[Any] = (flat.double() if flat.is_floating_point() else flat).numpy()
    elif isinstance(row, np.ndarray | np.generic | float | int):
        found = np.asarray(row).reshape(-1)
        found = found[_spread(len(found), _ELEMENTS)]
    else:
        return None
    if found.dtype.kind in "biu":
        return found.astype("<i8")
    return found.astype("<f8") if found.dtype.kind == "f" else None


def _coarse(values: NDArray[np.float64]) -> bytes:
    """Signs and orders of magnitude. The middle of an order is a power of 2, which data likes."""
    with np.errstate(all="ignore"):
        order = np.rint(np.log2(np.abs(values)))
    order[~np.isfinite(values)] = 2000
    largest = order[np.isfinite(values)].max(initial=-np.inf)
    order = np.where(order < largest - _RANGE, -2000, order)
    signs = np.where(order == -2000, 0, np.sign(np.nan_to_num(values)))
    return np.stack([np.nan_to_num(order, neginf=-2000), signs]).astype("<i2").tobytes()
