"""Which committed checkpoints are removed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.errors import ConfigError
from checkfreq.policy.retention import CheckpointInfo, KeepBest, KeepLast, RetentionPolicy


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
def test_all_but_the_newest_are_removed(
    num_kept: int, there: tuple[int, ...], gone: list[int]
) -> None:
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


def rated(**losses: float) -> list[CheckpointInfo]:
    """s7=0.5: step 7 with that loss."""
    return [CheckpointInfo(int(n[1:]), metrics={"loss": loss}) for n, loss in losses.items()]


NAN, INF = float("nan"), float("inf")


def test_the_best_stay_beside_the_newest() -> None:
    there = rated(s1=0.3, s2=0.1, s3=0.2, s4=0.9, s5=0.8)
    assert KeepBest(metric="loss", num_last=1).to_remove(there) == [1, 3, 4]
    assert KeepBest(metric="loss", highest=True, num_last=1).to_remove(there) == [1, 2, 3]
    assert KeepBest(metric="loss", num_kept=2, num_last=2).to_remove(there) == [1]


@pytest.mark.parametrize("worst", [NAN, INF, -INF])
@pytest.mark.parametrize("highest", [False, True])
def test_nan_and_infinity_are_never_the_best_and_do_not_hide_it(
    worst: float, highest: bool
) -> None:
    policy = KeepBest(metric="loss", highest=highest, num_last=1)
    for there in (
        rated(s1=worst, s2=0.5, s3=worst, s4=worst),
        rated(s1=worst, s2=0.5, s3=worst, s4=worst)[::-1],
    ):
        assert policy.to_remove(there) == [1, 3]


def test_one_without_the_metric_stays_as_long_as_it_is_new() -> None:
    there = [*rated(s1=0.5), CheckpointInfo(2), CheckpointInfo(3), CheckpointInfo(4)]
    assert KeepBest(metric="loss", num_last=2).to_remove(there) == [2]


def test_of_equal_ones_the_newer_stays_and_pinned_ones_do_not_count() -> None:
    there = [*rated(s1=0.5, s2=0.5, s3=0.9), CheckpointInfo(0, keep=True, metrics={"loss": 0.1})]
    assert KeepBest(metric="loss", num_last=1).to_remove(there) == [1]


@pytest.mark.parametrize("name", ["num_kept", "num_last"])
def test_the_best_need_a_number_of_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"KeepBest\({name}=...\): expected at least 1"):
        KeepBest(metric="loss", **{name: 0})
