"""How two tensors differ, and two trees of JSON. NumPy; no torch.

Elements are compared by their bits, so that -0.0 differs from 0.0, and a NaN from a NaN with other
bits; a NaN does not differ from itself. Values are compared where both are numbers. What NumPy has
no dtype for (bfloat16, float8, complex32) is decoded from its bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from checkfreq.types import Json

#: Elements that are compared at a time, which bounds the memory.
_CHUNK = 1 << 20
#: exponent bits, mantissa bits, bias, whether there are infinities, whether 0x80 is the only NaN.
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, False, False),
    "float8_e5m2": (5, 2, 15, True, False),
    "float8_e4m3fnuz": (4, 3, 8, False, True),
    "float8_e5m2fnuz": (5, 2, 16, False, True),
}
#: Dtypes whose elements are compared by their bits alone.
_WITHOUT_VALUES = ("float4_e2m1fn_x2",)


@dataclass(slots=True)
class Difference:
    """How much two tensors of one dtype and shape differ.

    ``max_abs``: the largest difference of two values; ``max_rel`` the same divided by the larger
    magnitude of the two. Both are None where no two values could be compared. ``num_nan``: elements
    of which one is a NaN and the other is not. ``decades``: by the power of ten below a
    difference, how many elements differ by so much; `_OTHER` counts those whose difference is
    zero or not a finite number.
    """

    num_elements: int
    num_different: int = 0
    num_nan: int = 0
    num_other: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    decades: Counter[int] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """The part of the elements that differs."""
        return self.num_different / self.num_elements if self.num_elements else 0.0


def difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: str) -> Difference:
    """Compare two arrays of one shape whose elements are of torch's ``dtype``."""
    found = Difference(a.size)
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for at in range(0, a.size, _CHUNK):
        part_a, part_b = flat_a[at : at + _CHUNK], flat_b[at : at + _CHUNK]
        where = np.flatnonzero(_bits_differ(part_a, part_b))
        if where.size:
            _add(found, part_a[where], part_b[where], dtype)
    return found


def _bits_differ(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if a.dtype.itemsize <= 8:
        kind = f"u{a.dtype.itemsize}"
        return np.asarray(a.view(kind) != b.view(kind))
    return np.asarray((a.view("u8") != b.view("u8")).reshape(-1, 2).any(axis=1))


def _add(found: Difference, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: str) -> None:
    found.num_different += a.size
    if dtype in _WITHOUT_VALUES:
        found.num_other += a.size
        return
    with np.errstate(all="ignore"):
        x, y = values(a, dtype), values(b, dtype)
        delta = _distance(x, y)
        found.num_nan += int(np.count_nonzero(np.isnan(x) != np.isnan(y)))
        is_number = ~np.isnan(delta)
        size = np.maximum(np.abs(x), np.abs(y)).astype(np.float64)
        relative = np.where(np.isinf(delta), np.inf, delta / np.where(size == 0, 1, size))
        if is_number.any():
            found.max_abs = max(found.max_abs or 0.0, float(delta[is_number].max()))
            found.max_rel = max(found.max_rel or 0.0, float(relative[is_number].max()))
        has_decade = np.isfinite(delta) & (delta > 0)
        decades = np.floor(np.log10(delta[has_decade])).astype(int)
    found.decades.update(decades.tolist())
    found.num_other += int(a.size - np.count_nonzero(has_decade))


def _distance(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if x.dtype.kind not in "iu":
        return np.asarray(np.abs(x - y), np.float64)
    # Exact also where the difference does not fit into the signed type.
    high, low = np.maximum(x, y), np.minimum(x, y)
    return np.asarray(high.astype(np.uint64) - low.astype(np.uint64), np.float64)


def values(bits: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The numbers that an array of `checkfreq.formats.numpy_reader` stands for."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return _values(bits, dtype)


def _values(bits: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "bfloat16":
        return np.asarray((bits.astype(np.uint32) << 16).view(np.float32), np.float64)
    if dtype == "complex32":
        pairs = np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
        return np.asarray(pairs.view(np.complex64))
    if dtype == "float8_e8m0fnu":
        return np.asarray(np.where(bits == 255, np.nan, np.ldexp(1.0, bits.astype(int) - 127)))
    if dtype in _FLOAT8:
        return np.asarray(_float8_table(*_FLOAT8[dtype])[bits])
    if dtype == "bool":
        return np.asarray(bits.view(np.uint8))
    return bits.astype(np.float64) if bits.dtype.kind == "f" else bits


def _float8_table(
    exponent_bits: int, mantissa_bits: int, bias: int, has_inf: bool, one_nan: bool
) -> np.ndarray[Any, Any]:
    """The value of each of the 256 bytes."""
    top = (1 << exponent_bits) - 1
    found = []
    for byte in range(256):
        sign = -1.0 if byte & 0x80 else 1.0
        exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        if one_nan and byte == 0x80:
            value = math.nan
        elif has_inf and exponent == top:
            value = math.nan if mantissa else math.inf
        elif not has_inf and not one_nan and byte & 0x7F == 0x7F:
            value = math.nan
        elif exponent == 0:
            value = math.ldexp(fraction, 1 - bias)
        else:
            value = math.ldexp(1.0 + fraction, exponent - bias)
        found.append(sign * value)
    return np.array(found)


@dataclass(frozen=True, slots=True)
class Change:
    """A value that differs. ``a`` or ``b`` is `MISSING` where only the other side has it."""

    name: str
    a: Json
    b: Json


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


def changes(a: Json, b: Json, name: str) -> Iterator[Change]:
    """The leaves at which two trees of JSON differ, each with its path below ``name``."""
    todo = [(name, a, b)]
    while todo:
        path, one, other = todo.pop()
        if type(one) is dict and type(other) is dict:
            keys = [*one, *(key for key in other if key not in one)]
            todo += [
                (f"{path}.{key}", one.get(key, MISSING), other.get(key, MISSING))
                for key in reversed(keys)
            ]
        elif type(one) is list and type(other) is list and len(one) == len(other):
            pairs = enumerate(zip(one, other, strict=True))
            todo += reversed([(f"{path}[{n}]", x, y) for n, (x, y) in pairs])
        elif type(one) is not type(other) or one != other:
            yield Change(path, one, other)
