"""Replicated tensors are divided completely, without overlap, and evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkfreq.state.division import TensorSize, divide


def bytes_of_members(sizes: list[TensorSize], num_members: int) -> list[float]:
    """Bytes per member; every row of every tensor is taken once."""
    loads = [0.0] * num_members
    for size, assignments in zip(sizes, divide(sizes, num_members), strict=True):
        rows: list[int] = []
        for member, span in assignments:
            begin, end = span or (0, max(1, size.num_rows))
            rows += range(begin, end)
            loads[member] += size.num_bytes * (end - begin) / max(1, size.num_rows)
        assert rows == [*range(max(1, size.num_rows))]
    return loads


sizes = st.builds(
    lambda rows, row_bytes, stays: TensorSize(max(1, rows) * row_bytes, rows, stays),
    st.integers(0, 40),
    st.integers(0, 500),
    st.booleans(),
)


@given(st.lists(sizes, max_size=30), st.integers(1, 6))
def test_every_row_of_every_tensor_is_taken_once(found: list[TensorSize], num_members: int) -> None:
    bytes_of_members(found, num_members)


def test_tensors_that_stay_count_for_the_first_member_and_a_single_one_takes_all() -> None:
    staying, moving = TensorSize(300, 0, True), TensorSize(900, 900, False)
    assert bytes_of_members([staying, moving], 4) == [300, 300, 300, 300]
    assert bytes_of_members([staying, staying, moving], 4) == [600, 300, 300, 300]
    assert bytes_of_members([staying, moving], 1) == [1200]
