"""What is held back for an agent that copies files, under any retention and any interval."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkfreq.policy.copying import held_back


def test_the_newest_that_the_agent_has_and_the_oldest_that_it_may_not_have_are_held() -> None:
    ages_s = {1: 90.0, 2: 61.0, 3: 60.0, 4: 59.0, 5: 30.0, 6: 0.0}
    assert held_back(ages_s, found=(), within_s=60.0) == {3, 4}


def test_what_was_found_is_held_until_the_agent_must_have_it() -> None:
    found = {1, 2, 3}
    assert held_back({1: 9.0, 2: 9.0, 3: 9.0, 4: 5.0, 5: 1.0}, found=found, within_s=60.0) == {
        *found,
        4,
    }
    assert held_back({1: 60.0, 2: 60.0, 3: 60.0, 4: 56.0}, found=found, within_s=60.0) == {3, 4}


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(0, 100),
)
def test_from_the_first_copy_on_one_that_the_agent_has_is_never_twice_as_old_as_it_needs(
    pauses_s: list[int], num_kept: int, within_s: int
) -> None:
    committed_s: dict[int, int] = {}
    now_s = 0
    for step, pause_s in enumerate(pauses_s, 1):
        now_s += pause_s
        committed_s[step] = now_s
        ages_s = {n: now_s - at_s for n, at_s in committed_s.items()}
        held = held_back(ages_s, found=(), within_s=within_s)
        kept = held | set(sorted(committed_s)[-num_kept:])
        assert len(kept) <= num_kept + 2
        committed_s = {n: at_s for n, at_s in committed_s.items() if n in kept}
        copied = [age_s for n, age_s in ages_s.items() if n in kept and age_s >= within_s]
        if now_s - pauses_s[0] >= within_s:
            assert copied
            assert min(copied) <= 2 * within_s + max(pauses_s)
