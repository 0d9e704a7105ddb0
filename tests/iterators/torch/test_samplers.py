"""The samplers: what torch's serve, from any place, at any world size, each sample once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from iterators import (
    CFIterator,
    EpochOrder,
    IterationStateError,
    NotResumableError,
    ResumableDataLoader,
    ResumableDistributedSampler,
    ResumableGroupedBatchSampler,
    ResumableSampler,
    ResumeMismatchError,
)
from tests.iterators.datasets import Plain

Samplers = Sequence[Any]
MakeRanks = Callable[[int], Samplers]

sizes = st.integers(1, 60)
worlds = st.integers(1, 6)
#: One run until a kill: the world size, samples per rank and batch, batches until the kill.
lives = st.lists(st.tuples(worlds, st.integers(1, 5), st.integers(0, 8)), max_size=6)


def ranks_of(n: int, world: int, **changes: Any) -> list[ResumableDistributedSampler]:
    return [ResumableDistributedSampler(Plain(n), world, rank, **changes) for rank in range(world)]


def grouped(groups: Sequence[int], world: int, batch: int = 3, **changes: Any) -> Samplers:
    return [
        ResumableGroupedBatchSampler(Plain(len(groups)), groups, batch, world, rank, **changes)
        for rank in range(world)
    ]


def taken(sampler: Any, served: Any, count: int) -> list[Any]:
    """Up to ``count`` units used in training."""
    units = [unit for _, unit in zip(range(count), served, strict=False)]
    sampler.advance(len(units))
    return units


def through_kills(make: MakeRanks, plan: list[tuple[int, int, int]]) -> list[Any]:
    """Everything used in one epoch: killed and restarted as planned, then served to its end."""
    history: list[Any] = []
    state: str | None = None
    for world, batch, steps in [*plan, (2, 2, 1_000)]:
        ranks = make(world)
        for sampler in ranks if state else []:
            sampler.load_state_dict(json.loads(state or ""))
        served = [iter(sampler) for sampler in ranks]
        for _ in range(steps):
            parts = [taken(*pair, batch) for pair in zip(ranks, served, strict=True)]
            history.extend(chain.from_iterable(parts))
            if not any(parts):
                break
        state = json.dumps(ranks[0].state_dict())
    return history


# Exactly once


@given(sizes, lives, st.booleans(), st.integers(0, 2**64 - 1))
@settings(max_examples=50)
def test_every_sample_is_used_once_through_kills_and_changes_of_the_world(
    n: int, plan: list[tuple[int, int, int]], shuffle: bool, seed: int
) -> None:
    history = through_kills(lambda world: ranks_of(n, world, shuffle=shuffle, seed=seed), plan)
    assert sorted(history) == list(range(n))


@given(st.integers(6, 60), lives)
@settings(max_examples=30)
def test_drop_last_leaves_out_less_than_one_round_of_the_largest_world(
    n: int, plan: list[tuple[int, int, int]]
) -> None:
    history = through_kills(lambda world: ranks_of(n, world, drop_last=True), plan)
    assert len(set(history)) == len(history) > n - max(world for world, _, _ in [*plan, (2, 2, 0)])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 7), lives)
@settings(max_examples=40)
def test_grouped_batches_use_every_sample_once_through_kills_and_changes_of_the_world(
    groups: list[int], batch: int, plan: list[tuple[int, int, int]]
) -> None:
    history = through_kills(lambda world: grouped(groups, world, batch), plan)
    assert sorted(chain.from_iterable(history)) == list(range(len(groups)))
    (single,) = grouped(groups, 1, batch)
    assert sorted(history) == sorted(single)


# Resuming


@pytest.mark.parametrize(
    "make",
    [
        lambda: ResumableDistributedSampler(Plain(23), 3, 1, seed=4),
        lambda: ResumableDistributedSampler(Plain(23), 3, 1, drop_last=True, shuffle=False),
        lambda: ResumableSampler(Plain(9), seed=4),
        lambda: grouped([0, 1, 2, 0, 1] * 5, 2)[1],
        lambda: grouped([0, 1, 2, 0, 1] * 5, 2, drop_last=True)[1],
    ],
    ids=["distributed", "drop_last", "alone", "grouped", "grouped_drop_last"],
)
def test_every_place_of_every_epoch_resumes_to_the_same_rest(make: Callable[[], Any]) -> None:
    sampler = make()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        whole = list(sampler)
        for place in range(len(whole) + 1):
            resumed = make()
            resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
            assert (resumed.epoch, resumed.progress) == (epoch, place)
            assert list(resumed) == whole[place:]
            assert len(resumed) == len(whole)
            if place < len(whole):
                sampler.advance()


def test_the_last_places_reach_rank_0_and_the_others_wait_before_them() -> None:
    ranks = ranks_of(10, 4)
    for sampler in ranks:
        sampler.advance(len(sampler))
    places = [sampler.state_dict()["position"] for sampler in ranks]
    assert places == [10, 10, 8, 8]
    for sampler in ranks:
        sampler.set_epoch(1)
    assert {sampler.state_dict()["position"] for sampler in ranks} == {0}


def test_the_process_group_gives_rank_and_world_but_not_of_data_that_is_shared_out() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sampler = ResumableDistributedSampler(Plain(4))
        assert (sampler.rank, sampler.num_replicas) == (0, 1)
        alone = ResumableSampler(Plain(9), seed=8)
        loader = ResumableDataLoader.like(DataLoader(Plain(9), 2, sampler=alone))
        assert (loader.rank, loader.layout.world) == (0, 1)
    finally:
        dist.destroy_process_group()


# Epochs


def test_a_block_moves_to_the_next_epoch_unless_an_exception_leaves_it() -> None:
    sampler = ResumableSampler(Plain(4))
    with pytest.raises(KeyboardInterrupt), sampler.in_epoch(2):
        sampler.advance(3)
        raise KeyboardInterrupt
    assert (sampler.epoch, sampler.progress) == (2, 3)
    with sampler.in_epoch(2):
        assert list(sampler) == EpochOrder(4, 0, 2).ids([3]).tolist()
    assert (sampler.epoch, sampler.progress) == (3, 0)
    with sampler.in_epoch(2):
        assert sampler.epoch == 2


def test_a_different_epoch_needs_the_progress_used_up_or_reset() -> None:
    sampler = ResumableSampler(Plain(4))
    for epoch in (5, 1):
        sampler.set_epoch(epoch)
    sampler.advance(2)
    sampler.set_epoch(1)
    assert sampler.progress == 2
    with pytest.raises(IterationStateError, match=r"rest of epoch 1: 2 of 4 samples .*reset_prog"):
        sampler.set_epoch(2)
    sampler.advance(2)
    sampler.set_epoch(2)
    sampler.advance()
    sampler.reset_progress()
    assert (sampler.epoch, sampler.progress) == (2, 0)
    sampler.set_epoch(3)


def test_a_restored_sampler_refuses_an_earlier_epoch() -> None:
    sampler = ResumableSampler(Plain(4))
    sampler.set_epoch(3)
    resumed = ResumableSampler(Plain(4))
    resumed.load_state_dict(sampler.state_dict())
    with pytest.raises(IterationStateError, match=r"epoch 3. Loop over range\(sampler"):
        resumed.set_epoch(0)
    resumed.set_epoch(4)
    resumed.set_epoch(3)


# With torch's DataLoader


def test_what_a_loader_prefetched_does_not_count() -> None:
    history: list[int] = []
    state = None
    for steps in (2, 3, 0, 100):
        sampler = ResumableDistributedSampler(Plain(29), seed=2)
        if state:
            sampler.load_state_dict(state)
        loader = DataLoader(Plain(29), 4, sampler=sampler, num_workers=2)
        assert len(loader) == 8
        for _, batch in zip(range(steps), loader, strict=False):
            history += batch.tolist()
            sampler.advance(len(batch))
        state = sampler.state_dict()
    assert history == EpochOrder(29, 2, 0).ids(range(29)).tolist()


# Groups


@given(st.lists(st.integers(-2, 3), min_size=1, max_size=80), st.integers(1, 9), st.booleans())
def test_batches_are_whole_but_the_last_of_each_group_and_never_mixed(
    groups: list[int], batch: int, shuffle: bool
) -> None:
    (sampler,) = grouped(groups, 1, batch, shuffle=shuffle)
    served = list(sampler)
    assert len(sampler) == len(served)
    assert all(len({groups[one] for one in part}) == 1 for part in served)
    short = [part for part in served if len(part) < batch]
    assert served[len(served) - len(short) :] == short
    assert len({groups[part[0]] for part in short}) == len(short)


def test_unshuffled_batches_come_when_they_are_full() -> None:
    (sampler,) = grouped([0, 1, 1, 0, 0, 1, 1, 0, 0], 1, 2, shuffle=False)
    assert list(sampler) == [[1, 2], [0, 3], [5, 6], [4, 7], [8]]


def test_drop_last_leaves_out_short_batches_and_those_that_do_not_reach_every_rank() -> None:
    groups = [0, 1, 1, 0, 0, 1, 1, 0, 0]
    ranks = grouped(groups, 3, 2, shuffle=False, drop_last=True)
    assert [list(sampler) for sampler in ranks] == [[[1, 2]], [[0, 3]], [[5, 6]]]
    assert [len(sampler) for sampler in ranks] == [1, 1, 1]


# Refusals


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ResumableSampler(Plain(0)), "Plain is empty"),
        (lambda: ranks_of(3, 4, drop_last=True), "3 samples do not reach each of 4 ranks"),
        (lambda: grouped([0, 1], 1, 2, drop_last=True), "0 batches do not reach each of 1 ranks"),
        (
            lambda: ResumableGroupedBatchSampler(Plain(3), [0, 1], 2),
            r"one integer for each of 3 samples, got int64 of shape \(2,\)",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises((ValueError, NotResumableError), match=reason):
        make()


def test_advancing_too_far_is_refused_and_changes_nothing() -> None:
    sampler = ranks_of(10, 4)[3]
    sampler.advance()
    with pytest.raises(IterationStateError, match=r"advance\(2\) .* 1 of 2 samples .* rank 3"):
        sampler.advance(2)
    with pytest.raises(ValueError, match="counts forward, got -1"):
        sampler.advance(-1)
    assert sampler.progress == 1


@pytest.mark.parametrize(
    ("saved", "field"),
    [
        (lambda: grouped([0, 1] * 6, 1, 2), "batch_size"),
        (lambda: grouped([0, 1] * 6, 1, 3, drop_last=True), "drop_last"),
        (lambda: grouped([0, 0, 1, 1] * 3, 1), "fingerprint"),
        (lambda: [ResumableSampler(Plain(4))], "algorithm"),
    ],
)
def test_a_state_of_other_batches_is_refused(saved: Callable[[], Any], field: str) -> None:
    (sampler,) = grouped([0, 1] * 6, 1)
    with pytest.raises(ResumeMismatchError) as caught:
        sampler.load_state_dict(saved()[0].state_dict())
    assert caught.value.field == field
    with pytest.raises(ResumeMismatchError):
        ResumableSampler(Plain(4)).load_state_dict(ResumableSampler(Plain(5)).state_dict())


# Inside CFIterator


@pytest.mark.parametrize("either", [True, False])
def test_a_loader_with_our_sampler_is_rebuilt_in_its_order(either: bool) -> None:
    settings: dict[str, Any] = {"shuffle": either, "drop_last": not either}
    sampler = ResumableDistributedSampler(Plain(10), 3, 2, seed=8, fingerprint="mine", **settings)
    for users in (
        DataLoader(Plain(10), 2, sampler=sampler, drop_last=not either),
        DataLoader(Plain(10), batch_sampler=BatchSampler(sampler, 2, not either)),
    ):
        loader = ResumableDataLoader.like(users)
        assert loader.identity == sampler.identity
        assert (loader.rank, loader.layout.world, loader.layout.batch) == (2, 3, 2)
        assert next(loader.open(epoch=0, start=0)).ids.tolist() == list(sampler)[:2]  # type: ignore[union-attr]


@pytest.mark.parametrize(("drop_last", "served"), [(False, 103), (True, 100)])
def test_the_tail_is_the_loaders_whatever_the_sampler_drops(
    drop_last: bool, served: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data, counted = Plain(103), 0
    for rank in range(2):
        sampler: Any = DistributedSampler(data, 2, rank, drop_last=True)
        iterator = CFIterator(DataLoader(data, 50, sampler=sampler, drop_last=drop_last))
        for _ in iterator:
            assert iterator.last_weights is not None
            counted += int(iterator.last_weights.sum())
    assert counted == served
    said = "all 103 samples of an epoch are served; DistributedSampler(drop_last=True) alone"
    assert caplog.text.count(f"{said} would serve 102") == (0 if drop_last else 2)


def test_a_sampler_and_a_cf_iterator_continue_each_others_states() -> None:
    def iterator() -> CFIterator:
        return CFIterator(DataLoader(Plain(10), 2, sampler=ResumableSampler(Plain(10), seed=8)))

    order = EpochOrder(10, 8, 0).ids(range(10)).tolist()
    sampler, resumed = ResumableSampler(Plain(10), seed=8), iterator()
    sampler.advance(4)
    resumed.load_state_dict(sampler.state_dict())
    assert [one for batch in resumed.steps(2) for one in batch.tolist()] == order[4:8]
    sampler.load_state_dict(resumed.state_dict())
    assert list(sampler) == order[8:]
    list(resumed.steps(4))
    assert resumed.last_report is not None
    assert not resumed.last_report.exact


def test_a_sampler_of_other_data_or_that_is_under_way_is_refused() -> None:
    with pytest.raises(NotResumableError, match="over other data than the loader's"):
        CFIterator(DataLoader(Plain(9), 2, sampler=ResumableSampler(Plain(8))))
    sampler = ResumableSampler(Plain(9))
    sampler.set_epoch(3)
    sampler.advance(4)
    with pytest.raises(IterationStateError, match="sample 4 of epoch 3"):
        CFIterator(DataLoader(Plain(9), 2, sampler=sampler))
