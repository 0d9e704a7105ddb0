"""When a rank looks for what it waits for; what is absent is found with few questions."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from checkfreq.ranks.line import Pace, absent


def looks(pace: Pace, wait_s: float) -> tuple[int, float]:
    """How often one looks for what comes after ``wait_s``, and when it is seen."""
    count, now_s = 0, 0.0
    while now_s < wait_s or count == 0:
        now_s += pace.pause_s(now_s)
        count += 1
    pace.took(now_s)
    return count, now_s


@settings(max_examples=40)
@given(st.integers(2, 4096), st.lists(st.floats(1e-4, 100.0), min_size=1, max_size=9))
def test_no_wait_becomes_longer_by_a_quarter_and_by_0_3_ms_a_rank(
    world: int, waits: list[float]
) -> None:
    pace = Pace(world)
    for wait_s in waits:
        _, seen_s = looks(pace, wait_s)
        assert seen_s <= wait_s + max(0.25 * wait_s, 0.01, 3e-4 * world) + 1e-9


def test_all_ranks_together_look_at_the_store_no_more_often_however_many_they_are() -> None:
    for world in (256, 512, 1000):
        assert world / Pace(world).pause_s(60.0) <= 2000
    assert Pace(10**6).pause_s(60.0) == 0.5  # a stop signal is to be noticed
    assert Pace(4).pause_s(60.0) == 0.05


@settings(max_examples=40)
@given(st.sets(st.integers(0, 255)))
def test_what_is_absent_is_found_by_halving(missing: set[int]) -> None:
    asked = 0

    def are_there(keys: list[str]) -> bool:
        nonlocal asked
        asked += 1
        return not any(int(key) in missing for key in keys)

    assert absent(are_there, [str(n) for n in range(256)]) == [str(n) for n in sorted(missing)]
    assert asked <= 1 + 16 * len(missing)
