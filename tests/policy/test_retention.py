"""Which committed checkpoints may go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.errors import ConfigError
from checkfreq.policy.retention import CheckpointInfo, KeepLast, RetentionPolicy


def infos(*steps: int, pinned: tuple[int, ...] = ()) -> list[CheckpointInfo]:
    return [CheckpointInfo(step, keep=step in pinned) for step in steps]


@pytest.mark.parametrize(
    ("num_kept", "there", "gone"),
    [
        (3, (), []),
        (3, (1, 2, 3), []),
        (3, (1, 2, 3, 4, 5), [1, 2]),
        (1, (7, 9), [7]),
    ],
)
def test_all_but_the_newest_go(num_kept: int, there: tuple[int, ...], gone: list[int]) -> None:
    assert KeepLast(num_kept).to_remove(infos(*there)) == gone


def test_pinned_ones_stay_and_do_not_count() -> None:
    assert KeepLast(2).to_remove(infos(1, 2, 3, 4, 5, pinned=(1, 4))) == [2]


def test_the_default_is_three() -> None:
    assert KeepLast() == KeepLast(3)


def test_keeping_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected at least 1 checkpoint, got 0"):
        KeepLast(0)


@given(
    there=st.dictionaries(st.integers(0, 99), st.booleans(), max_size=20),
    num_kept=st.integers(1, 5),
)
def test_the_newest_and_all_pinned_ones_always_survive(
    there: dict[int, bool], num_kept: int
) -> None:
    policy: RetentionPolicy = KeepLast(num_kept)
    gone = policy.to_remove([CheckpointInfo(s, keep=k) for s, k in sorted(there.items())])
    assert len(gone) == len({*gone})
    assert not [step for step in gone if there[step]]
    if there:
        assert max(there) not in gone
    left = [step for step, keep in there.items() if not keep and step not in gone]
    assert len(left) <= num_kept
    assert all(step < min(left) for step in gone)
