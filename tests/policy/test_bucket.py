"""The overhead bound as a token bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.policy.bucket import TokenBucket


def test_productive_time_earns_at_the_rate() -> None:
    bucket = TokenBucket(0.05)
    bucket.earn(40)
    assert bucket.balance_s == pytest.approx(2)


def test_the_balance_may_fall_below_zero_and_comes_back() -> None:
    bucket = TokenBucket(0.1)
    bucket.spend(3)
    assert bucket.balance_s == -3
    bucket.earn(50)
    assert bucket.balance_s == pytest.approx(2)


def test_no_more_is_saved_up_than_the_depth() -> None:
    bucket = TokenBucket(0.5)
    bucket.earn(100)
    bucket.limit(4)
    assert bucket.balance_s == 4
    bucket.earn(100)
    bucket.spend(-7)
    assert bucket.balance_s == 4


@given(
    rate=st.floats(0.001, 0.999),
    moves=st.lists(st.tuples(st.floats(0, 100), st.floats(-10, 100), st.floats(0, 50))),
)
def test_what_was_spent_is_never_more_than_was_earned_less_the_balance(
    rate: float, moves: list[tuple[float, float, float]]
) -> None:
    bucket, earned_s, spent_s = TokenBucket(rate), 0.0, 0.0
    for productive_s, cost_s, depth_s in moves:
        bucket.limit(depth_s)
        bucket.earn(productive_s)
        bucket.spend(cost_s)
        earned_s, spent_s = earned_s + rate * productive_s, spent_s + cost_s
        assert spent_s <= earned_s - bucket.balance_s + 1e-6
        assert bucket.balance_s <= depth_s
