"""Iterable datasets: every state resumes exactly, every change that would not is refused."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from iterators import (
    CFIterator,
    CorruptPositionError,
    NotResumableError,
    Position,
    ResumableDataLoader,
    ResumableIterableLoader,
    ResumeMismatchError,
)
from iterators.testing import FakeManager, check_resumable, digest, walk
from tests.iterators.datasets import Augmented
from tests.iterators.streams import (
    Batched,
    Indexed,
    Opaque,
    OwnIterator,
    SelfIndexed,
    Sized,
    Squares,
    Stateful,
    Subscriptable,
    Walked,
    drawn,
)

# torchdata 0.11 still calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def rebuilt(dataset: Any, batch: int | None = 2, **settings: Any) -> CFIterator:
    return CFIterator(DataLoader(dataset, batch, **settings), seed=9)


def generators() -> str:
    return digest([torch.get_rng_state(), repr(random.getstate()), list(np.random.get_state())])  # type: ignore[arg-type]


def restored(state: dict[str, Any], dataset: Any, **settings: Any) -> CFIterator:
    iterator = rebuilt(dataset, **settings)
    iterator.load_state_dict(json.loads(json.dumps(state)))
    return iterator


def state_after(iterator: CFIterator, batches: int) -> dict[str, Any]:
    list(iterator.steps(batches))
    return iterator.state_dict()


# Every state resumes exactly


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("kind", [Opaque, Stateful, Walked])
@pytest.mark.parametrize(
    ("shares", "workers", "drop_last"),
    [([4], 0, False), ([0], 0, False), ([5], 1, False), ([5], 0, True), ([1, 4, 3], 3, True)],
)
def test_every_state_resumes_exactly(
    kind: type[Opaque], shares: list[int], workers: int, drop_last: bool
) -> None:
    tried = check_resumable(
        lambda: rebuilt(kind(shares), num_workers=workers, drop_last=drop_last),
        epochs=1 if workers > 1 else 2,
    )
    per_epoch = sum(one // 2 if drop_last else -(-one // 2) for one in shares)
    assert tried == (1 if workers > 1 else 2) * per_epoch + 1


def test_a_dataset_that_is_its_own_iterator_resumes_exactly() -> None:
    check_resumable(lambda: rebuilt(OwnIterator([5])), epochs=2)
    check_resumable(lambda: rebuilt(OwnIterator([4, 2]), num_workers=2), epochs=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_ready_batches_pass_through(workers: int) -> None:
    make = lambda: rebuilt(Batched([3, 2]), None, num_workers=workers)  # noqa: E731
    check_resumable(make, epochs=1)
    assert [len(batch) for batch in make()] == ([1, 2, 2, 3, 3] if workers else [1, 2, 3])


@pytest.mark.more
def test_spawned_workers_resume() -> None:
    spawned = rebuilt(Opaque([3, 1]), num_workers=2, multiprocessing_context="spawn")
    whole = walk(spawned, epochs=1)
    state = json.loads(whole[2].state)
    assert walk(restored(state, Opaque([3, 1]), num_workers=2), epochs=1) == whole[2:]


def test_epochs_ranks_and_seeds_draw_differently() -> None:
    def draws(epoch: int = 0, **options: Any) -> str:
        loader = ResumableIterableLoader(Opaque([2]), 2, **options)
        return digest([one.data["torch"] for one in loader.open(epoch=epoch, start=0)])

    options: list[dict[str, Any]] = [{"seed": 1}, {"rank": 0, "world": 2}, {"rank": 1, "world": 2}]
    assert draws() == draws() == draws(rank=0, world=2)
    assert len({draws(epoch=1), *(draws(**one) for one in options)}) == 4


def test_no_worker_outlives_its_epoch() -> None:
    for loader, dataset in ((DataLoader, Opaque([4, 4])), (StatefulDataLoader, Augmented(9))):
        iterator = CFIterator(loader(dataset, 2, num_workers=2))
        next(iter(iterator))
        iterator.reset()
        assert not multiprocessing.active_children(), loader
        for _ in iterator:
            pass
        assert not multiprocessing.active_children(), loader


# Epochs


def test_an_epoch_begins_with_the_dataset_as_it_was_made() -> None:
    for workers in (0, 1):
        dataset = Stateful([5])
        iterator = rebuilt(dataset, num_workers=workers)
        ids = [[batch["id"].tolist() for batch in iterator] for _ in iterator.epochs(3)]
        base = [[one % 1_000_000 for one in batch] for batch in ids[0]]
        expected = [
            [[1_000_000 * epoch + one for one in batch] for batch in base] for epoch in range(3)
        ]
        assert ids == expected
        assert (dataset.index, dataset.epoch) == (0, 0)


class Counting(IterableDataset[int]):
    """Goes on to another order by itself in each epoch, which a copy of it takes with it."""

    def __init__(self) -> None:
        self.epoch_weights, self.epoch_source = torch.ones(2), object()
        self.epoch = self.epochs_begun = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch_weights *= 2
        self.epochs_begun += 1
        yield from random.Random(self.epoch).sample(range(8), 8)
        self.epoch += 1


class Told(Counting):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_dataset_that_counts_its_own_epochs_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    epochs = {}
    for dataset in (Counting(), Told()):
        iterator = rebuilt(dataset)
        epochs[type(dataset)] = [[batch.tolist() for batch in iterator] for _ in iterator.epochs(3)]
    assert epochs[Counting] == [epochs[Counting][0]] * 3
    assert epochs[Told][1] != epochs[Told][0]
    (warned,) = caplog.records
    assert "Counting counts its epochs itself: epoch went from 0 to 1" in warned.message
    assert "set_epoch(epoch)" in warned.message


@pytest.mark.parametrize("claimed", [3, 40])
def test_a_wrong_length_loses_nothing(claimed: int) -> None:
    manager = FakeManager()
    counted = CFIterator(
        DataLoader(Sized([4, 3], claimed), 2, num_workers=2), seed=9, cf_manager=manager
    )
    assert len(counted) == len(counted._adapter) == -(-claimed // 2)  # type: ignore[arg-type]
    batches = []
    for _ in counted.epochs(1):
        for _ in counted:
            manager.weight_update()
            batches.append(counted.batch)
    assert batches == [0, 1, 2, 3]
    assert manager.events == ["first", "step", "step", "step", "end_epoch"]


# What a dataset sees


def split(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.shares = [0, 0]  # type: ignore[attr-defined]
    info.dataset.shares[worker] = 2 + worker  # type: ignore[attr-defined]


def test_worker_init_reaches_the_users_dataset() -> None:
    assert len(list(rebuilt(Opaque([0, 0]), 1, num_workers=2, worker_init_fn=split))) == 5


def test_skipping_is_counted_timed_and_explained(caplog: pytest.LogCaptureFixture) -> None:
    for kind, said in ((Stateful, False), (Walked, False), (Opaque, True)):
        list(restored(state_after(rebuilt(kind([20])), 5), kind([20])))
        words = "skipped 5 batches by making their samples again, which took"
        assert (words in caplog.text) is said


def test_an_iterator_that_lost_its_state_is_refused() -> None:
    state = state_after(rebuilt(Walked([8])), 3)
    stateless = type("Walked", (Opaque,), {})  # another class under the same name
    with pytest.raises(NotResumableError, match="the iterator of Walked had state_dict"):
        list(restored(state, stateless([8])))


class Eager(Opaque):
    """Draws all it serves as soon as it is asked for an iterator: from a generator of its own,
    seeded as torch's documents say, and from the global one."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        own = random.Random(info.seed if info else 0)
        return iter([(own.random(), random.random()) for _ in range(self.share()[1])])


def test_seeds_of_workers_and_what_iter_draws_are_the_same_after_a_restore() -> None:
    def make(*shares: int) -> CFIterator:
        random.random()  # the caller's generator stands elsewhere
        return rebuilt(Eager([*shares]), num_workers=len(shares) - 1 and len(shares))

    served = walk(make(2, 1), epochs=2)
    assert len({one.digest for one in served}) == len(served)
    check_resumable(lambda: make(2, 1), epochs=1)
    check_resumable(lambda: make(5))


class Failing(Opaque):
    def __iter__(self) -> Iterator[Any]:
        yield drawn(1)
        raise OSError("no such shard")


def test_a_failing_dataset_fails_with_its_own_error_and_loses_no_boundary() -> None:
    """The error comes while the iterator looks ahead."""
    manager, before = FakeManager(), generators()
    iterator = CFIterator(DataLoader(Failing([1])), cf_manager=manager)
    with pytest.raises(OSError, match="no such shard"):
        for _ in iterator:
            manager.weight_update()
    assert manager.events == ["first", "step"]
    assert generators() == before


class Secretive(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": [1, {2}]}


def test_a_state_that_cannot_be_saved_is_named() -> None:
    with pytest.raises(TypeError, match=r"state\['seen'\]\[1\] is a set"):
        list(rebuilt(Secretive([4])))


# Indexed sources


@pytest.mark.parametrize("kind", [Indexed, SelfIndexed])
def test_an_indexed_source_is_read_by_number(kind: type[IterableDataset[int]]) -> None:
    loader = rebuilt(kind(), 4)
    assert isinstance(loader._adapter, ResumableDataLoader)
    assert [batch.tolist() for batch in loader] == [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]
    assert len(rebuilt(kind(), 4, drop_last=True)) == 2
    assert isinstance(ResumableDataLoader(Indexed()).dataset, Squares)


def test_an_index_alone_does_not_replace_the_datasets_own_order() -> None:
    given = DataLoader(Subscriptable(), 4)
    iterator = CFIterator(given)
    assert isinstance(iterator._adapter, ResumableIterableLoader)
    assert [batch.tolist() for batch in iterator] == [batch.tolist() for batch in given]
    with pytest.raises(NotResumableError, match=r"without indexed_source\(\)"):
        ResumableDataLoader(Subscriptable())


# Refusals


@pytest.mark.parametrize(
    ("field", "changes"),
    [("workers", {"num_workers": 1}), ("batch", {"batch": 3}), ("batch", {"batch": None})],
)
def test_a_different_layout_is_refused_within_an_epoch_only(
    field: str, changes: dict[str, Any]
) -> None:
    first = rebuilt(Stateful([8]))
    state = state_after(first, 3)
    with pytest.raises(ResumeMismatchError, match="until the epoch ends") as refused:
        restored(state, Stateful([8]), **changes)
    assert refused.value.field == field
    list(first.steps(4))
    assert restored(first.state_dict(), Stateful([8]), **changes).epoch == 1


def test_a_different_world_is_refused_within_an_epoch_only() -> None:
    def rank(index: int, world: int) -> CFIterator:
        return CFIterator(ResumableIterableLoader(Stateful([4]), 2, rank=index, world=world))

    ranks = [rank(0, 2), rank(1, 2)]
    parts = [state_after(one, 1) for one in ranks]
    merged = rank(0, 1).merged_state(parts)
    with pytest.raises(ResumeMismatchError, match="world is 1, but the position was saved with 2"):
        rank(0, 1).load_state_dict(merged)
    with pytest.raises(ResumeMismatchError, match=r"with 1\. .* of all ranks, in rank order"):
        rank(1, 2).load_state_dict(parts[1])
    for index, one in enumerate(ranks):
        other = rank(index, 2)
        other.load_state_dict(merged)
        assert [digest(batch) for batch in other] == [digest(batch) for batch in one.steps(2)]
    between = ranks[0].merged_state([one.state_dict() for one in ranks])
    alone = rank(0, 1)
    alone.load_state_dict(between)
    assert (alone.epoch, len(list(alone))) == (1, 2)


def test_a_different_dataset_or_way_is_refused() -> None:
    with pytest.raises(ResumeMismatchError, match="algorithm is .* the same methods"):
        restored(state_after(rebuilt(Stateful([8])), 2), Opaque([8]))
    with pytest.raises(ResumeMismatchError, match="fingerprint"):
        restored(state_after(rebuilt(Opaque([8])), 2), Sized([8], 9))


@pytest.mark.parametrize(
    "changes",
    [
        *({"made": [3]}, {"made": [-2]}, {"made": [1, 1]}, {"made": None}, {"ended": [0]}),
        *({"turn": 1}, {"turn": "0"}, {"states": [7]}, {"states": ["{"]}),
        *({"states": ['{"$":"array"}']}, (), (None,), ({},)),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(changes: Any) -> None:
    position = Position.from_dict(state_after(rebuilt(Stateful([8])), 2))
    states = ({**position.states[0], **changes},) if isinstance(changes, dict) else changes
    iterator = rebuilt(Stateful([8]))
    before = iterator.state_dict()
    with pytest.raises(CorruptPositionError):
        iterator.load_state_dict(replace(position, states=states).to_dict())
    assert iterator.state_dict() == before


def test_a_generator_that_became_shorter_is_refused() -> None:
    state = state_after(rebuilt(Opaque([8])), 3)
    with pytest.raises(ResumeMismatchError, match="must yield the same samples again"):
        list(restored(state, Opaque([2])))


# torchdata's loader as the engine
