"""Which committed checkpoints are removed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.errors import ConfigError
from checkfreq.policy.retention import (
    DEFAULT_RETENTION,
    AnyOf,
    KeepBest,
    KeepEpochs,
    KeepEvery,
    KeepLast,
    Retention,
    Worth,
)
from checkfreq.policy.retention_info import CheckpointInfo


def infos(*steps: int, pinned: tuple[int, ...] = ()) -> list[CheckpointInfo]:
    return [CheckpointInfo(step, keep=step in pinned) for step in steps]


def test_pinned_ones_stay_and_do_not_count() -> None:
    assert KeepLast(2).to_remove(infos(1, 2, 3, 4, 5, pinned=(1, 4))) == [2]


def rated(**losses: float) -> list[CheckpointInfo]:
    """s7=0.5: step 7 with that loss."""
    return [CheckpointInfo(int(n[1:]), metrics={"loss": loss}) for n, loss in losses.items()]


NAN, INF = float("nan"), float("inf")


def test_the_best_stay_beside_the_newest() -> None:
    there = rated(s1=0.3, s2=0.1, s3=0.2, s4=0.9, s5=0.8)
    assert KeepBest(metric="loss", num_last=1).to_remove(there) == [1, 3, 4]
    assert KeepBest(metric="loss", highest=True, num_last=1).to_remove(there) == [1, 2, 3]
    assert KeepBest(metric="loss", num_kept=2, num_last=2).to_remove(there) == [1]


@pytest.mark.parametrize(("worst", "highest"), [(NAN, False), (INF, True), (-INF, False)])
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


HOUR_S = 3600.0
#: A midnight in UTC.
DAY_S = 20_000 * 24 * HOUR_S


def made(*hours: float, first: int = 1) -> list[CheckpointInfo]:
    """Steps 1, 2, ... made so many hours after midnight, of 10 bytes each."""
    return [
        CheckpointInfo(first + n, created_s=DAY_S + hour * HOUR_S, num_bytes=10)
        for n, hour in enumerate(hours)
    ]


def kept(policy: Retention, there: list[CheckpointInfo]) -> list[int]:
    gone = policy.to_remove(there)
    assert gone == sorted(set(gone))
    return [c.step for c in there if c.step not in gone]


def test_the_first_of_each_period_of_hours_stays_and_the_newest() -> None:
    there = made(0.1, 0.5, 1.0, 1.9, 2.5, 2.6, 2.7)
    assert kept(KeepEvery(hours=1), there) == [1, 3, 5, 7]
    assert kept(KeepEvery(hours=2), there) == [1, 5, 7]


def test_history_grows_no_older_than_it_is_kept_for() -> None:
    there = made(0.0, 1.0, 2.0, 3.0, 4.0)
    assert kept(KeepEvery(hours=1, for_hours=2), there) == [3, 4, 5]


def test_the_first_at_or_after_each_multiple_of_steps_stays() -> None:
    there = infos(3, 9, 10, 14, 25, 29, 31, 39)
    assert kept(KeepEvery(steps=10), there) == [10, 25, 31, 39]


def test_a_clock_that_goes_back_ends_no_history_and_keeps_no_more() -> None:
    forward = made(0.0, 0.5, 24 * 365.0)
    back = made(1.0, 1.2, 2.0, 2.1, first=4)
    assert kept(KeepEvery(hours=1), forward + back) == [1, 3, 6, 7]
    assert kept(KeepEvery(hours=1, for_hours=24), forward + back) == [3, 6, 7]


def test_the_ends_of_epochs_stay() -> None:
    there = [CheckpointInfo(step, at_epoch_end=step % 3 == 0) for step in range(1, 11)]
    assert kept(KeepEpochs(), there) == [3, 6, 9, 10]
    assert kept(KeepEpochs(2), there) == [6, 9, 10]
    assert kept(KeepEpochs(), infos(1, 2)) == [2]


def test_a_policy_is_joined_with_policies_alone() -> None:
    with pytest.raises(TypeError):
        KeepLast(1) | 3  # type: ignore[operator]


def test_a_budget_gives_up_history_first_then_recent_ones_then_the_best() -> None:
    there = [
        CheckpointInfo(step, created_s=DAY_S + step * HOUR_S, num_bytes=10, metrics={"loss": loss})
        for step, loss in ((1, 0.9), (2, 0.1), (3, 0.8), (4, 0.7), (5, 0.6))
    ]
    policy = KeepBest(metric="loss", num_last=2) | KeepEvery(hours=1)
    assert kept(policy.within(50), there) == [1, 2, 3, 4, 5]
    assert kept(policy.within(49), there) == [2, 3, 4, 5]
    assert kept(policy.within(30), there) == [2, 4, 5]
    assert kept(policy.within(20), there) == [2, 5]
    assert kept(policy.within(10), there) == [5]
    assert kept(policy.within(1), there) == [5]


def test_pinned_ones_take_room_in_a_budget_and_are_never_given_up() -> None:
    there = [CheckpointInfo(step, keep=step in (1, 2), num_bytes=10) for step in (1, 2, 3, 4, 5, 6)]
    assert kept(KeepLast(3).within(40), there) == [1, 2, 5, 6]
    assert kept(KeepLast(3).within(5), there) == [1, 2, 6]
    assert kept(KeepLast(3).within(45) | KeepLast(1), there) == [1, 2, 5, 6]


def test_what_policies_want_is_known_through_any_composition() -> None:
    bounded = (KeepBest(metric="f1", highest=True) | KeepEpochs()).within_disk()
    for policy, wanted in ((bounded | KeepLast(2)).within(9), True), (KeepLast(1).within(9), False):
        assert policy.wants_epoch_ends() is wanted
        assert policy.fits_disk() is wanted
        assert policy.prefers_highest("f1") is wanted
        assert not policy.prefers_highest("loss")
    assert DEFAULT_RETENTION.fits_disk()


def test_history_alone_may_be_given_up() -> None:
    there = made(0.0, 1.0, 2.0, 3.0)
    policy = (KeepLast(2) | KeepEvery(hours=1)).within_disk()
    assert policy.give_up(there, 15) == [1, 2]
    assert policy.give_up(there, 25) == [1, 2, 3]
    assert policy.give_up(there, 1000, at_most=Worth.HISTORY) == [1, 2]
    assert policy.give_up(there, 0) == policy.give_up([], 5) == []


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (DEFAULT_RETENTION, "up to 28 checkpoints (28.0 GiB) and 1 more a day (1.0 GiB), as far"),
        (KeepLast(2).within(4 << 30), "up to 2 checkpoints (2.0 GiB), in at most 4.0 GiB"),
        (KeepBest(metric="loss") | KeepEpochs(5), "up to 9 checkpoints (9.0 GiB)"),
        (KeepLast(1) | KeepEpochs(), "(1.0 GiB) and one an epoch (1.0 GiB each)"),
        (KeepEvery(steps=500), "and one every 500 steps (1.0 GiB each)"),
    ],
)
def test_what_a_policy_keeps_is_said_in_bytes(policy: Retention, text: str) -> None:
    assert text in policy.cost().text(1 << 30)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeepEvery(), "either hours or steps, got hours=None, steps=None"),
        (lambda: KeepEvery(hours=0), r"KeepEvery\(hours=...\): expected more than 0, got 0"),
        (lambda: KeepEvery(steps=-1), r"KeepEvery\(steps=...\): expected more than 0, got -1"),
        (lambda: KeepEvery(hours=1, for_hours=NAN), r"\(for_hours=...\): expected more than 0"),
        (lambda: KeepLast(0), "expected at least 1 checkpoint, got 0"),
        (
            lambda: KeepBest(metric="", num_kept=0),
            r"KeepBest\(num_kept=...\): expected at ",
        ),
        (
            lambda: KeepBest(metric="", num_last=0),
            r"KeepBest\(num_last=...\): expected at ",
        ),
        (lambda: KeepEpochs(0), "KeepEpochs: expected at least 1 epoch, got 0"),
        (lambda: KeepLast(1).within(0), r"within\(0\): expected at least 1 byte"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


SIMPLE = st.one_of(
    st.builds(KeepLast, st.integers(1, 4)),
    st.builds(lambda hours: KeepEvery(hours=hours), st.sampled_from([0.5, 1.0, 3.0])),
    st.builds(lambda steps: KeepEvery(steps=steps), st.integers(1, 9)),
    st.builds(
        lambda num, high: KeepBest(metric="m", highest=high, num_kept=num),
        st.integers(1, 3),
        st.booleans(),
    ),
    st.builds(KeepEpochs, st.none() | st.integers(1, 3)),
)
POLICIES = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a, n: a.within(n), inner, st.integers(1, 80)),
        st.builds(lambda a: a.within_disk(), inner),
    ),
    max_leaves=4,
)
CHECKPOINTS = st.lists(
    st.builds(
        CheckpointInfo,
        st.integers(0, 60),
        keep=st.booleans(),
        metrics=st.dictionaries(st.just("m"), st.sampled_from([0.1, 0.5, NAN, INF]), max_size=1),
        created_s=st.floats(0, 1e5),
        num_bytes=st.integers(1, 20),
        at_epoch_end=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda c: c.step,
).map(lambda found: sorted(found, key=lambda c: c.step))


@given(policy=POLICIES, there=CHECKPOINTS)
def test_under_any_policy_the_newest_and_pinned_ones_stay_and_a_second_look_removes_nothing(
    policy: Retention, there: list[CheckpointInfo]
) -> None:
    gone = policy.to_remove(there)
    assert gone == sorted(set(gone))
    left = [c for c in there if c.step not in gone]
    assert [c for c in there if c.keep] == [c for c in left if c.keep]
    if there:
        assert there[-1] in left
    given_up = policy.give_up(left, 10**6)
    assert given_up == [c.step for c in left[:-1] if not c.keep]


@given(policies=st.lists(SIMPLE, min_size=1, max_size=3), there=CHECKPOINTS)
def test_a_union_keeps_exactly_what_one_of_its_policies_keeps(
    policies: list[Retention], there: list[CheckpointInfo]
) -> None:
    """The model: a plain list, filtered by each policy alone."""
    alone = [set(kept(policy, there)) for policy in policies]
    assert kept(AnyOf(tuple(policies)), there) == sorted(set().union(*alone))


def test_the_default_thins_out_into_the_past() -> None:
    """A checkpoint every 6 minutes for 3 days, asked after each as a run does."""
    held: list[CheckpointInfo] = []
    for n in range(3 * 240):
        held.append(CheckpointInfo(n + 1, created_s=DAY_S + n * 360, num_bytes=1))
        gone = set(DEFAULT_RETENTION.to_remove(held))
        held = [c for c in held if c.step not in gone]
        assert len(held) <= 28 + n // 240
    hours = [(c.created_s - DAY_S) / HOUR_S for c in held]
    assert hours[:2] == [0.0, 24.0]
    assert hours[2:-3] == [float(hour) for hour in range(48, 72)]
    assert hours[-3:] == [71.7, 71.8, 71.9]
