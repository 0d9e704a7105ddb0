"""Pauses between attempts at something that keeps failing."""

from __future__ import annotations

from checkfreq.policy.backoff import Backoff


def pauses(backoff: Backoff, num: int) -> list[float]:
    """The pauses after ``num`` consecutive failures, all at second 100."""
    found = []
    for _ in range(num):
        backoff.failed(100.0)
        found.append(backoff.left_s(100.0))
    return found


def test_the_first_failure_costs_no_pause_and_those_after_it_double_to_five_minutes() -> None:
    expected = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0]
    assert pauses(Backoff(), 12) == expected


def test_a_pause_ends_when_its_time_is_over() -> None:
    backoff = Backoff()
    pauses(backoff, 3)
    assert backoff.left_s(101.5) == 0.5
    assert backoff.left_s(102.0) == 0.0
    assert backoff.left_s(1e6) == 0.0


def test_a_success_ends_the_pause_and_starts_the_count_anew() -> None:
    backoff = Backoff()
    pauses(backoff, 5)
    backoff.succeeded()
    assert (backoff.num_in_row, backoff.left_s(100.0)) == (0, 0.0)
    assert pauses(backoff, 3) == [0.0, 1.0, 2.0]
