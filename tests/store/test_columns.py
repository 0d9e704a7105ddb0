"""Values that are much alike come back as they were, and take little room."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.store.columns import pack, unpack

KEYS = st.sampled_from(["a", "b", "$each", "$same", "$tuple", "of", "form"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(st.lists(VALUES, max_size=6))
def test_every_value_comes_back_as_it_was(values: list[Any]) -> None:
    found = unpack(through_json(pack(values)), len(values))
    assert json.dumps(found) == json.dumps(values)


def test_what_is_the_same_is_written_once() -> None:
    values = [{"epoch": 3, "at": n, "where": {"$tuple": [1]}} for n in range(3)]
    assert pack(values) == [
        {
            "of": [[0, 3]],
            "form": {"epoch": 3, "at": {"$each": [0, 1, 2]}, "where": {"$same": {"$tuple": [1]}}},
        }
    ]


def test_one_is_neither_true_nor_one_point_nought() -> None:
    assert pack([1, True, 1.0]) == [{"of": [[0, 3]], "form": {"$each": [1, True, 1.0]}}]


@pytest.mark.parametrize(
    "tables",
    [
        None,
        [1],
        [{"of": [[0, 2]]}],
        [{"of": [[0]], "form": 1}],
        [{"of": [[0, 1.0]], "form": 1}],
        [{"of": [[-1, 2]], "form": 1}],
        [{"of": [[0, 10**15]], "form": 1}],
        [{"of": [[0, 1]], "form": 1}],
        [{"of": [[0, 2]], "form": 1}, {"of": [[0, 1]], "form": 1}],
        [{"of": [[0, 2]], "form": {"$each": [1]}}],
        [{"of": [[0, 2]], "form": {"$each": 1}}],
    ],
)
def test_tables_that_nothing_was_packed_into_are_refused(tables: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        unpack(tables, 2)
