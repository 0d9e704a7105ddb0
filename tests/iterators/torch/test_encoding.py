"""A state survives JSON bit for bit, and what would not is refused by name."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iterators.testing import digest
from iterators.torch.encoding import decode, dumps, encode, loads

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=1 << 20_000, max_value=1 << 20_001)
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
)
KEYS = st.text(max_size=3) | st.just("$") | st.integers() | st.tuples(st.binary(), st.booleans())
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal in value, type and order; a NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, float):
        return one.hex() == other.hex()
    return bool(one == other)


@given(STATES)
def test_a_state_survives_strict_json(state: Any) -> None:
    text = dumps(state)
    assert text.isascii()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert same(loads(text), state)


ARRAYS = [
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.array([1.5, math.nan]),
    np.array(["a", "bcd"]),
    np.array(["2026-01-01"], dtype="M8[s]"),
    np.arange(12)[::-2],
    np.float32(0.1),
    np.str_("text"),
    torch.arange(6.0).reshape(2, 3).t(),
    torch.tensor([1.0, -0.0], dtype=torch.bfloat16),
    torch.tensor([1 + 2j]).conj(),
]


@pytest.mark.parametrize("state", ARRAYS, ids=repr)
def test_an_array_survives_with_its_type_and_shape(state: Any) -> None:
    back = loads(dumps([state]))[0]
    assert type(back) is type(state)
    assert back.dtype == state.dtype
    assert digest(back) == digest(state)


REFUSED: list[tuple[Any, str]] = [
    ({"buffer": [1, {2}]}, r"state\['buffer'\]\[1\] is a set"),
    (OrderedDict(a=1), "state is a OrderedDict"),
    ({frozenset(): 1}, "a key of state is a frozenset"),
    ([np.array([object()])], r"state\[0\] is an array of object"),
    (np.ma.masked_array([1]), "state is a MaskedArray"),
    (torch.nn.Parameter(torch.zeros(1)), "state is a Parameter"),
    ([torch.zeros(2).to_sparse()], r"state\[0\] is a tensor on cpu \(torch.sparse_coo\)"),
]


@pytest.mark.parametrize(("state", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_saved_is_named_with_its_place(state: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        encode(state)


DAMAGED: list[Any] = [
    *({"$": "unknown"}, {"$": ["list"]}, {"$": "tuple"}, {"$": "bytes", "base64": "?"}),
    *({"$": "float", "hex": "00"}, {"$": "int", "hex": None}),
    {"$": "array", "dtype": "<f8", "shape": [2], "base64": ""},
    {"$": "array", "dtype": "|O", "shape": [], "base64": "AAAAAAAAAAA="},
    {"$": "array", "dtype": [["a", "O"]], "shape": [1], "base64": "AAAAAAAAAAA="},
    {"$": "array", "dtype": "<f8", "shape": [10**30], "base64": ""},
    {"$": "tensor", "dtype": "float32", "shape": [1], "base64": "AAA="},
    {"$": "tensor", "dtype": "save", "shape": [1], "base64": ""},
    {"$": "tensor", "dtype": "float32", "shape": [2**62, 0, 8], "base64": ""},
    {"$": "tensor", "dtype": "float32", "shape": [-1], "base64": ""},
]


@pytest.mark.parametrize("value", DAMAGED, ids=repr)
def test_what_encode_does_not_write_is_a_value_error_and_takes_no_memory(value: Any) -> None:
    with pytest.raises(ValueError, match="not an encoded"):
        decode(value)


def test_text_that_is_nested_without_end_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        loads("[" * 100_000)
