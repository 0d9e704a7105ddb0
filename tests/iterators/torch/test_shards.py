"""Shards are interleaved in a closed form, read sequentially, and resumed at any layout."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from iterators import (
    CFIterator,
    NotResumableError,
    ResumableDataLoader,
    ResumableDistributedSampler,
    ResumableGroupedBatchSampler,
    ResumableSampler,
    ShardedDataset,
)
from iterators.torch.shards import ShardOrder

LENGTHS = [4, 1, 0, 7, 3, 5]


class Shelf:
    """Shards named ``0``, ``1``, ...; notes every opening and every record read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.opened: list[tuple[str, int]] = []
        self.read: list[str] = []
        self.closed = 0

    def __call__(self, shard: str, start: int) -> Iterator[str]:
        self.opened.append((shard, start))
        try:
            for record in range(start, self.lengths[int(shard)]):
                self.read.append(f"{shard}.{record}")
                yield f"{shard}.{record}"
        finally:
            self.closed += 1


def names(count: int) -> list[str]:
    return [str(shard) for shard in range(count)]


def records(shard: str, start: int) -> Iterator[str]:
    """A reader that cannot seek."""
    whole = (f"{shard}.{record}" for record in range(LENGTHS[int(shard)]))
    return islice(whole, start, None)


def dataset(**options: Any) -> ShardedDataset:
    return ShardedDataset(names(6), records, **{"lengths": LENGTHS, "lanes": 3, **options})


# The order


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.integers(1, 12),
    st.integers(0, 2**64 - 1),
    st.integers(0, 3),
)
def test_the_order_is_a_permutation_with_an_inverse(
    lengths: list[int], lanes: int, seed: int, epoch: int
) -> None:
    order = ShardOrder(tuple(lengths), min(lanes, len(lengths)), seed, epoch)
    ids = order.ids(np.arange(order.n))
    assert sorted(ids.tolist()) == list(range(order.n))
    assert order.positions(ids).tolist() == list(range(order.n))
    for walk in (order.ids, order.positions):
        with pytest.raises(IndexError, match=rf"\[0, {order.n}\)"):
            walk([order.n])


GOLDEN = {
    (0, 0): [12, 5, 4, 13, 6, 15, 14, 7, 16, 0, 8, 17, 1, 9, 18, 2, 10, 19, 3, 11],
    (0, 1): [12, 5, 0, 13, 6, 1, 14, 7, 2, 15, 8, 3, 16, 9, 4, 17, 10, 18, 11, 19],
    (7, 0): [0, 15, 4, 1, 16, 12, 2, 17, 13, 3, 18, 14, 5, 19, 6, 7, 8, 9, 10, 11],
}


@pytest.mark.parametrize(("seed", "epoch"), GOLDEN)
def test_the_order_never_changes(seed: int, epoch: int) -> None:
    assert ShardOrder(tuple(LENGTHS), 3, seed, epoch).ids(range(20)).tolist() == GOLDEN[seed, epoch]


def test_neighbours_come_from_different_shards_and_each_is_read_forwards() -> None:
    order = ShardOrder((50,) * 12, 4, 3, 0)
    shards, within = np.divmod(order.ids(np.arange(600)), 50)
    assert all(len(set(row)) == 4 for row in shards.reshape(-1, 4).tolist())
    for shard in range(12):
        assert within[shards == shard].tolist() == list(range(50))


# The dataset


def test_a_sample_is_found_by_shard_and_record() -> None:
    whole = dataset(lengths=None)  # they are counted
    assert whole.lengths == LENGTHS
    assert len(whole) == 20
    expected = [f"{shard}.{record}" for shard in range(6) for record in range(LENGTHS[shard])]
    assert [whole[index] for index in range(20)] == expected
    assert [whole[index] for index in reversed(range(20))] == expected[::-1]
    assert whole.sample_name(5) == "3, record 0"
    with pytest.raises(IndexError, match=r"\[0, 20\)"):
        whole[20]


def test_going_forward_reads_on_and_decodes_only_what_is_asked_for() -> None:
    shelf, decoded = Shelf([9, 9]), []
    whole = ShardedDataset(names(2), shelf, lengths=[9, 9], decode=decoded.append)
    for index in (1, 10, 4, 5, 17):
        whole[index]
    assert shelf.opened == [("0", 1), ("1", 1)]
    assert decoded == ["0.1", "1.1", "0.4", "0.5", "1.8"]
    assert shelf.closed == 1, "a shard at its end is closed"
    whole[3]
    assert shelf.opened[2:] == [("0", 3)]
    assert shelf.closed == 2, "a jump back closes what it leaves"


@pytest.mark.parametrize("ask", [[2], [0, 2], [1]])
def test_a_shard_that_is_too_short_is_named(ask: list[int]) -> None:
    whole = ShardedDataset(["a.tar"], lambda name, start: iter(["x"][start:]), lengths=[3])
    with pytest.raises(ValueError, match="shard a.tar has 1 records, but its length is given as 3"):
        for index in ask:
            whole[index]


def test_open_readers_are_neither_pickled_nor_shared_by_fork() -> None:
    shelf = Shelf([9])
    whole = ShardedDataset(["0"], shelf, lengths=[9])
    assert whole[2] == "0.2"
    for other in (pickle.loads(pickle.dumps(dataset())), copy.copy(dataset())):
        assert other[3] == "0.3"
    whole._readers._pid = os.getpid() + 1  # as a child of a fork sees it
    assert whole[3] == "0.3"
    assert shelf.opened == [("0", 2), ("0", 3)]


def test_the_fingerprint_sees_names_lengths_and_lanes_but_not_the_folder() -> None:
    def fingerprint(folder: str, **options: Any) -> str:
        shards = [f"{folder}/{name}.tar" for name in options.pop("names", "abc")]
        options = {"lengths": [1, 2, 3], "lanes": 2, **options}
        return ShardedDataset(shards, records, **options).data_fingerprint()

    base = fingerprint("/data")
    assert fingerprint("/mnt/other") == base
    changed = [{"names": "abd"}, {"lengths": [1, 3, 2]}, {"lanes": 3}]
    assert len({base, *(fingerprint("/data", **one) for one in changed)}) == 4


def test_shards_without_lasting_names_need_names_or_a_fingerprint() -> None:
    def handles(**options: Any) -> ShardedDataset:
        return ShardedDataset([object()] * 2, records, lengths=[1, 2], **options)

    with pytest.raises(NotResumableError, match=r"a object has no name .* names=\[\.\.\.\]"):
        ResumableDataLoader(handles())
    assert ResumableDataLoader(handles(), fingerprint="mine").identity.fingerprint == "mine"
    one, moved, other = (handles(names=names) for names in (["x/a", "x/b"], ["y/a", "y/b"], "ac"))
    assert one.data_fingerprint() == moved.data_fingerprint() != other.data_fingerprint()
    assert one.sample_name(2) == "x/b, record 1"
    path, text = (ShardedDataset([one], records, lengths=[1]) for one in (Path("d/a"), "d/a"))
    assert path.data_fingerprint() == text.data_fingerprint()


# In a loader


def test_the_samplers_take_the_order_of_the_shards_as_the_loader_does() -> None:
    whole = dataset()
    order = whole.epoch_order(5, 1).ids(range(20)).tolist()
    sampler = ResumableDistributedSampler(whole, 1, 0, seed=5)
    grouped = ResumableGroupedBatchSampler(whole, [0] * 20, 4, 1, 0, seed=5)
    for one in (sampler, grouped):
        one.set_epoch(1)
    assert list(sampler) == [one for batch in grouped for one in batch] == order
    assert list(ResumableSampler(whole, shuffle=False)) == list(range(20))
    sampler.advance(8)
    users = DataLoader(whole, 4, sampler=ResumableDistributedSampler(whole, 1, 0, seed=5))
    resumed = CFIterator(users)
    resumed.load_state_dict(sampler.state_dict())
    next(iter(resumed))
    assert resumed.last_ids is not None
    assert resumed.last_ids.tolist() == order[8:12]
