"""JSON trees: every supported type comes back exactly, and any other is refused."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkfreq.errors import StateError
from checkfreq.state.codec import decode_tree, encode_tree


def through_json(value: Any) -> Any:
    text = json.dumps(encode_tree(value, "x"), allow_nan=False, sort_keys=True)
    return decode_tree(json.loads(text))


VALUES: list[Any] = [
    5e-324,
    math.inf,
    "\udcff broken",
    1 + 2j,
    complex(math.inf, -0.0),
    bytearray(b"abc"),
    {1: "a", (2, 3): "b", None: "c", False: "d", 2.5: "e"},
    {"$tuple": [1]},
    OrderedDict([("z", 1), ("a", 2)]),
    Counter({30: 1, 60: 2}),
    defaultdict(list, {"a": [1]}),
    deque([1, 2], maxlen=5),
    {1, 2, 3},
    frozenset({("a", 1)}),
    slice(1, None, 2),
    range(0, 10, 3),
    ...,
    timedelta(days=1, microseconds=3),
    PurePosixPath("a/b"),
    np.float64(math.nan),
    np.int64(-5),
    np.bool_(True),
    np.datetime64("2026-01-01"),
    np.dtype("float32"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}-{v!r}"[:40])
def test_value_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    back = through_json(value)
    assert type(back) is type(value)
    assert repr(back) == repr(value)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["ab", "c"]),
        np.array([[1, 2], [3, 4]], dtype=">i4"),
        np.zeros((0, 3)),
        np.array([1], dtype="m8[s]"),
    ],
    ids=str,
)
def test_numpy_arrays_come_back_without_torch(array: Any) -> None:
    back = through_json(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


@pytest.mark.parametrize(
    "values",
    [
        [*range(-70, 70)],
        [-(2**63), 2**63 - 1] * 50,
        [2**31 - 1, -(2**31)] * 50,
        [-0.0, math.inf, -math.inf, 5e-324, math.nan] * 20,
        [i % 3 == 0 for i in range(100)],
    ],
    ids=["small", "64 bits", "32 bits", "floats", "bools"],
)
@pytest.mark.parametrize("kind", [list, tuple, deque], ids=lambda kind: kind.__name__)
def test_long_lists_of_numbers_are_packed_and_come_back_with_their_types(
    kind: type, values: list[Any]
) -> None:
    text = json.dumps(encode_tree(kind(values), "x"))
    assert '{"$packed": ' in text
    back = decode_tree(json.loads(text))
    assert type(back) is kind
    assert [*map(repr, back)] == [*map(repr, values)]
    assert {*map(type, back)} == {type(values[0])}


@pytest.mark.parametrize("odd", [True, 1.0, None, 2**63], ids=repr)
def test_long_lists_of_other_values_are_not_packed(odd: Any) -> None:
    values = [*range(100), odd]
    assert type(encode_tree(values, "x")) is list
    assert [*map(repr, through_json(values))] == [*map(repr, values)]


def test_nan_keeps_its_sign_and_payload_alone_and_in_a_packed_list() -> None:
    strange = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    for back in (through_json(strange), through_json([0.0] * 99 + [strange])[-1]):
        assert struct.pack(">d", back).hex() == "fff8000000000123"


class Colour(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


class MyDict(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Colour.RED,
        Pair(1, 2),
        MyDict(),
        defaultdict(lambda: 0),
        np.array([object()]),
        np.zeros(2, dtype=[("a", "i4")]),
        np.ma.masked_array([1]),
        int,
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_value_that_would_not_come_back_exactly_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(StateError, match=r"^optimizer\.param_groups\[0\]\.foo: .*without pickle"):
        encode_tree({"param_groups": [{"foo": value}]}, "optimizer")


def test_a_bad_key_and_a_bad_set_member_are_named() -> None:
    with pytest.raises(StateError, match="x key <object"):
        encode_tree({object(): 1}, "x")
    with pytest.raises(StateError, match="x member"):
        encode_tree({object()}, "x")


def test_a_structure_that_contains_itself_is_refused_and_one_that_shares_is_not() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateError, match=r"x\[0\] contains itself"):
        encode_tree(loop, "x")
    shared = [1]
    assert through_json([shared, shared]) == [[1], [1]]


@pytest.mark.parametrize(
    "node",
    [
        {"$newer": 1},
        {"$tuple": 5},
        {"$dict": [1]},
        {"$defaultdict": [], "factory": "x"},
        {"$int": "z"},
    ],
    ids=str,
)
def test_malformed_trees_raise_value_error(node: Any) -> None:
    with pytest.raises(ValueError, match=r"malformed|unknown tag|invalid literal"):
        decode_tree(node)


trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=50)
@given(trees)
def test_any_tree_of_plain_values_round_trips_in_its_order(tree: Any) -> None:
    unsorted = json.loads(json.dumps(encode_tree(tree, "x"), allow_nan=False))
    assert repr(decode_tree(unsorted)) == repr(tree)
