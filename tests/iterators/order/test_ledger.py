"""The ledger adds, tells any missing or doubled sample, and the bitmap names it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iterators.loop.cursor import expected_ledger
from iterators.order.epoch import EpochOrder, ListedOrder
from iterators.order.ledger import AuditBitmap, Ledger, ledger_of_places, ledger_of_range

ids = st.lists(st.integers(0, 2**62), max_size=30)


@given(first=ids, second=ids)
def test_ledgers_add_like_the_multisets_they_describe(first: list[int], second: list[int]) -> None:
    assert Ledger.of(first) + Ledger.of(second) == Ledger.of(second + first)
    assert Ledger.of(first + second) - Ledger.of(second) == Ledger.of(first)


@given(served=ids)
def test_a_ledger_survives_json(served: list[int]) -> None:
    assert Ledger.from_dict(Ledger.of(served).to_dict()) == Ledger.of(served)


def test_a_whole_epoch_equals_the_closed_set() -> None:
    order = EpochOrder(100_000, 1, 2)
    assert ledger_of_places(order, 0, order.n) == ledger_of_range(order.n)


def test_one_sample_missing_or_doubled_or_swapped_shows() -> None:
    closed = ledger_of_range(100)
    whole = list(range(100))
    assert Ledger.of(whole) == closed
    assert Ledger.of(whole[:-1]) != closed
    assert Ledger.of([*whole, 7]) != closed
    assert Ledger.of([*whole[:-1], 7]) != closed


@pytest.mark.parametrize("place", [0, 1, 40, 60, 100])
def test_the_expected_ledger_of_part_of_an_epoch_counts_that_part(place: int) -> None:
    order = EpochOrder(100, 1, 2)
    assert expected_ledger(order, place) == Ledger.of(order.ids(np.arange(100))[:place])


def test_the_expected_ledger_of_a_listed_order_counts_repeats() -> None:
    order = ListedOrder([5, 5, 1, 5], num_samples=6)
    assert expected_ledger(order, 4) == Ledger.of([5, 5, 1, 5])


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"count": "1", "sum": "0" * 16, "xor": "0" * 16},
        {"count": -1, "sum": "0" * 16, "xor": "0" * 16},
        {"count": True, "sum": "0" * 16, "xor": "0" * 16},
        {"count": 1, "sum": 0, "xor": "0" * 16},
        {"count": 1, "sum": "0" * 16, "xor": 0},
        {"count": 1, "sum": "0" * 15, "xor": "0" * 16},
        {"count": 1, "sum": "g" * 16, "xor": "0" * 16},
    ],
)
def test_what_is_not_a_ledger_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"not a ledger|invalid literal"):
        Ledger.from_dict(state)


def test_the_bitmap_names_the_missing_and_the_doubled() -> None:
    bitmap = AuditBitmap(11)
    bitmap.mark([0, 1, 2, 10])
    bitmap.mark(np.array([4, 4, 2, 7]))
    assert bitmap.doubled() == [2, 4]
    assert bitmap.missing(range(11)).tolist() == [3, 5, 6, 8, 9]
