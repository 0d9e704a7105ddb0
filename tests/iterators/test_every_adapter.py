"""One conformance test over every kind of torch loader: with and without workers, each tail.

DALI's loaders have no workers; theirs is in ``tests/iterators/dali``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from iterators import (
    CFIterator,
    ResidentDataset,
    ResumableDataLoader,
    ResumableDistributedSampler,
    ResumableSampler,
    ShardedDataset,
)
from iterators.testing import check_elastic, check_resumable
from tests.iterators.datasets import Augmented, ByBatch
from tests.iterators.streams import Indexed, Opaque, Stateful, drawn

# torchdata 0.11 still calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

SHARDS = {"a": 4, "b": 0, "c": 3, "d": 4}


def records(shard: str, start: int) -> Iterator[str]:
    return islice((f"{shard}{index}" for index in range(SHARDS[shard])), start, None)


def sharded() -> ShardedDataset:
    lengths = list(SHARDS.values())
    return ShardedDataset(list(SHARDS), records, lengths=lengths, lanes=2, decode=noised)


def noised(record: str) -> tuple[str, dict[str, Any]]:
    return record, drawn(0)


def resident() -> ResidentDataset:
    return ResidentDataset(Augmented(11), rank=0, world=1, transform=lambda sample: sample["id"])


MAP_STYLE: dict[str, Callable[[], Any]] = {
    "map-style": lambda: Augmented(11),
    "subset": lambda: Subset(Augmented(20), range(4, 15)),
    "fetched by batch": lambda: ByBatch(11),
    "shards": sharded,
    "resident": resident,
    "iterable with an indexed source": Indexed,
}
GIVEN: dict[str, Callable[..., Any]] = {
    "DataLoader": lambda **settings: DataLoader(Augmented(11), 4, shuffle=True, **settings),
    "StatefulDataLoader": lambda **settings: StatefulDataLoader(
        Augmented(11), 4, shuffle=True, **settings
    ),
    "distributed sampler": lambda drop_last, **settings: DataLoader(
        Augmented(11),
        4,
        sampler=ResumableDistributedSampler(Augmented(11), 1, 0, drop_last=drop_last),
        drop_last=drop_last,
        **settings,
    ),
    "sampler": lambda **settings: DataLoader(
        Augmented(11), 4, sampler=ResumableSampler(Augmented(11)), **settings
    ),
    "iterable": lambda num_workers, **settings: DataLoader(
        Stateful([7, 4][: max(1, num_workers)]), 3, num_workers=num_workers, **settings
    ),
    "opaque iterable": lambda num_workers, **settings: DataLoader(
        Opaque([7, 4][: max(1, num_workers)]), 3, num_workers=num_workers, **settings
    ),
    "StatefulDataLoader over an iterable": lambda num_workers, **settings: StatefulDataLoader(
        Stateful([7, 4][: max(1, num_workers)]), 3, num_workers=num_workers, **settings
    ),
}

with_workers = pytest.mark.parametrize("workers", [0, 2])
with_tails = pytest.mark.parametrize("tail", ["short", "drop"])


@with_workers
@with_tails
@pytest.mark.parametrize("kind", GIVEN)
def test_a_loader_as_it_is_resumes_from_every_state(kind: str, tail: str, workers: int) -> None:
    def make() -> CFIterator:
        return CFIterator(GIVEN[kind](num_workers=workers, drop_last=tail == "drop"))

    assert check_resumable(make) > 3


@with_workers
@with_tails
@pytest.mark.parametrize("kind", MAP_STYLE)
def test_a_map_style_dataset_resumes_from_every_state(kind: str, tail: Any, workers: int) -> None:
    def make() -> CFIterator:
        loader = ResumableDataLoader(
            MAP_STYLE[kind](), 4, shuffle=True, seed=5, tail=tail, num_workers=workers
        )
        return CFIterator(loader)

    assert check_resumable(make) > 3


@with_tails
@pytest.mark.parametrize("kind", [kind for kind in MAP_STYLE if kind != "fetched by batch"])
def test_a_map_style_dataset_resumes_at_any_layout(kind: str, tail: Any) -> None:
    def make(rank: int, world: int, batch: int) -> CFIterator:
        loader = ResumableDataLoader(
            MAP_STYLE[kind](),
            batch,
            shuffle=True,
            seed=5,
            tail=tail,
            rank=rank,
            world=world,
            collate_fn=list,
        )
        return CFIterator(loader)

    assert check_elastic(make, batches=(1, 2, 3), worlds=(1, 2, 3), most_served=3) > 1


def test_what_a_shard_holds_is_what_is_served() -> None:
    served = CFIterator(ResumableDataLoader(sharded(), 3, shuffle=True, collate_fn=list))
    found = sorted(record for batch in served for record, _ in batch)
    assert found == sorted(f"{name}{index}" for name in SHARDS for index in range(SHARDS[name]))
