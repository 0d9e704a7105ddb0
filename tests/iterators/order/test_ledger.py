"""The ledger adds, tells any missing or doubled sample, and the bitmap names it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iterators.loop.cursor import expected_ledger
from iterators.order.epoch import EpochOrder, ListedOrder
from iterators.order.ledger import AuditBitmap, Ledger, ledger_of_range

ids = st.lists(st.integers(0, 2**62), max_size=30)


@given(first=ids, second=ids)
def test_ledgers_add_like_the_multisets_they_describe(first: list[int], second: list[int]) -> None:
    assert Ledger.of(first) + Ledger.of(second) == Ledger.of(second + first)
    assert Ledger.of(first + second) - Ledger.of(second) == Ledger.of(first)


@pytest.mark.parametrize("place", [0, 1, 60, 100])
def test_the_expected_ledger_of_part_of_an_epoch_counts_that_part(place: int) -> None:
    order = EpochOrder(100, 1, 2)
    assert expected_ledger(order, place) == Ledger.of(order.ids(np.arange(100))[:place])
    listed = ListedOrder([5, 5, 1, 5], num_samples=6)
    assert expected_ledger(listed, 4) == Ledger.of([5, 5, 1, 5])


def test_one_sample_missing_or_doubled_or_swapped_shows() -> None:
    closed = ledger_of_range(100)
    whole = list(range(100))
    assert Ledger.of(whole) == closed
    for other in (whole[:-1], [*whole, 7], [*whole[:-1], 7]):
        assert Ledger.of(other) != closed


@pytest.mark.parametrize(
    "changes", [{"count": "1"}, {"count": -1}, {"sum": 0}, {"xor": 0}, {"sum": "0" * 15}], ids=str
)
def test_what_is_not_a_ledger_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"not a ledger|invalid literal"):
        Ledger.from_dict({"count": 1, "sum": "0" * 16, "xor": "0" * 16, **changes})


def test_the_bitmap_names_the_missing_and_the_doubled() -> None:
    bitmap = AuditBitmap(11)
    bitmap.mark([0, 1, 2, 10])
    bitmap.mark(np.array([4, 4, 2, 7]))
    assert bitmap.doubled() == [2, 4]
    assert bitmap.missing(range(11)).tolist() == [3, 5, 6, 8, 9]
