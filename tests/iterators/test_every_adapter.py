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
    "iterable": lambda num_workers, **settings: DataLoader(
        Stateful([7, 4][: max(1, num_workers)]), 3, num_workers=num_workers, **settings
    ),
    "StatefulDataLoader over an iterable": lambda num_workers, **settings: StatefulDataLoader(
        Opaque([7, 4][: max(1, num_workers)]), 3, num_workers=num_workers, **settings
    ),
}

layouts = pytest.mark.parametrize(("tail", "workers"), [("short", 2), ("drop", 0)])


@layouts
@pytest.mark.parametrize("kind", GIVEN)
def test_a_loader_as_it_is_resumes_from_every_state(kind: str, tail: str, workers: int) -> None:
    def make() -> CFIterator:
        return CFIterator(GIVEN[kind](num_workers=workers, drop_last=tail == "drop"))

    assert check_resumable(make, epochs=1 if workers else 2) > 3


@pytest.mark.parametrize("kind", MAP_STYLE)
def test_a_map_style_dataset_resumes_from_every_state(kind: str) -> None:
    def make(workers: int) -> CFIterator:
        loader = ResumableDataLoader(
            MAP_STYLE[kind](), 4, shuffle=True, seed=5, num_workers=workers
        )
        return CFIterator(loader)

    tried = check_resumable(lambda: make(0), make_resumed=lambda: make(1), epochs=1)
    assert tried > 3


@pytest.mark.parametrize("tail", ["short", "drop"])
@pytest.mark.parametrize("kind", [kind for kind in MAP_STYLE if kind != "fetched by batch"])
def test_a_map_style_dataset_resumes_at_any_layout(kind: str, tail: Any) -> None:
    def make(rank: int, world: int, batch: int) -> CFIterator:
        settings: dict[str, Any] = {"shuffle": True, "seed": 5, "tail": tail, "collate_fn": list}
        return CFIterator(
            ResumableDataLoader(MAP_STYLE[kind](), batch, rank=rank, world=world, **settings)
        )

    assert check_elastic(make, batches=(1, 2, 3), worlds=(1, 2, 3), most_served=3) > 1
