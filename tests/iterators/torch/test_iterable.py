"""Iterable datasets: every state resumes exactly, every change that would not is refused."""

from __future__ import annotations

import json
import logging
import multiprocessing
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import iterators
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
from iterators.torch.worker_batches import ItemKind, WorkerBatches, WorkerItem
from tests.iterators.datasets import Augmented
from tests.iterators.streams import (
    Batched,
    Indexed,
    Opaque,
    OwnIterator,
    Rewound,
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

SHARES = [
    ([5], 0),
    ([4], 0),
    ([0], 0),
    ([5], 1),
    ([5, 2], 2),
    ([2, 4], 2),
    ([0, 3], 2),
    ([1, 4, 3], 3),
    ([4, 0, 2], 3),
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("kind", [Opaque, Stateful, Walked])
@pytest.mark.parametrize(
    ("shares", "workers", "drop_last"),
    [*((*one, False) for one in SHARES), *((*one, True) for one in SHARES[::4])],
)
def test_every_state_resumes_exactly(
    kind: type[Opaque], shares: list[int], workers: int, drop_last: bool
) -> None:
    tried = check_resumable(
        lambda: rebuilt(kind(shares), num_workers=workers, drop_last=drop_last), epochs=2
    )
    per_epoch = sum(one // 2 if drop_last else -(-one // 2) for one in shares)
    assert tried == 2 * per_epoch + 1


@pytest.mark.parametrize(("shares", "workers"), [([5], 0), ([4, 2], 2)])
@pytest.mark.parametrize("kind", [OwnIterator, Rewound])
def test_a_dataset_that_is_its_own_iterator_resumes_exactly(
    kind: type[Opaque], shares: list[int], workers: int
) -> None:
    check_resumable(lambda: rebuilt(kind(shares), num_workers=workers), epochs=2)


def test_a_state_that_cannot_be_loaded_before_iter_nor_after_it_raises() -> None:
    class Renamed(Stateful):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.missing.update(state)

    with pytest.raises(AttributeError, match="missing"):
        list(restored(state_after(rebuilt(Renamed([5])), 1), Renamed([5])))


@pytest.mark.parametrize("workers", [0, 2])
def test_ready_batches_pass_through(workers: int) -> None:
    make = lambda: rebuilt(Batched([3, 2]), None, num_workers=workers)  # noqa: E731
    check_resumable(make)
    assert [len(batch) for batch in make()] == ([1, 2, 2, 3, 3] if workers else [1, 2, 3])


@pytest.mark.parametrize(("kind", "context"), [(Opaque, "spawn"), (Stateful, "forkserver")])
def test_workers_of_other_kinds_resume(kind: type[Opaque], context: str) -> None:
    def make() -> CFIterator:
        return rebuilt(kind([3, 1]), num_workers=2, multiprocessing_context=context)

    whole = walk(make(), epochs=1)
    state = json.loads(whole[2].state)
    assert walk(restored(state, kind([3, 1]), num_workers=2), epochs=1) == whole[2:]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_is_torchs_own(workers: int) -> None:
    class Plain(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            start, step = (0, 1) if info is None else (info.id, info.num_workers)
            return iter(range(start, 11 + start * 6, step))

    def served(loader: Any) -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    given = DataLoader(Plain(), 2, num_workers=workers)
    assert served(CFIterator(given)) == served(given)


@pytest.mark.parametrize("kind", [Opaque, Stateful, Walked])
def test_a_second_and_third_restore_in_an_epoch(kind: type[Opaque]) -> None:
    whole = walk(rebuilt(kind([7, 4]), num_workers=2), epochs=2)
    served, state = [], None
    for stop in (1, 3, 4, 99):
        iterator = rebuilt(kind([7, 4]), num_workers=2)
        for _ in range(2 if state else 0):
            iterator.load_state_dict(state)
        served += [digest(batch) for batch in iterator.steps(min(stop, len(whole)))]
        state = iterator.state_dict()
    assert served == [one.digest for one in whole]


def test_epochs_ranks_and_seeds_draw_differently() -> None:
    def draws(epoch: int = 0, **options: Any) -> str:
        loader = ResumableIterableLoader(Opaque([2]), 2, **options)
        return digest([one.data["torch"] for one in loader.open(epoch=epoch, start=0)])

    options: list[dict[str, Any]] = [{"seed": 1}, {"rank": 0, "world": 2}, {"rank": 1, "world": 2}]
    assert draws() == draws() == draws(rank=0, world=2)
    assert len({draws(epoch=1), *(draws(**one) for one in options)}) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_callers_generators_alone(workers: int) -> None:
    state = state_after(rebuilt(Opaque([4, 4]), num_workers=workers), 1)
    before = generators()
    for _ in restored(state, Opaque([4, 4]), num_workers=workers):
        assert generators() == before
    assert generators() == before


def test_no_worker_outlives_its_epoch() -> None:
    for loader in (DataLoader, StatefulDataLoader):
        for dataset in (Opaque([4, 4]), Augmented(9)):
            iterator = CFIterator(loader(dataset, 2, num_workers=2))
            next(iter(iterator))
            iterator.reset()
            assert not multiprocessing.active_children(), (loader, dataset)
            for _ in iterator:
                pass
            assert not multiprocessing.active_children(), (loader, dataset)


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


@pytest.mark.parametrize("kind", [Opaque, Stateful])
@pytest.mark.parametrize("share", [4, 5])
def test_the_last_boundary_of_an_epoch_closes_it(kind: type[Opaque], share: int) -> None:
    manager = FakeManager()
    iterator = CFIterator(DataLoader(kind([share]), 2), cf_manager=manager)
    for _ in iterator.epochs(2):
        for _ in iterator:
            manager.weight_update()
    per_epoch = ["step"] * (-(-share // 2) - 1) + ["end_epoch"]
    assert manager.events == ["first", *per_epoch, *per_epoch]
    last = Position.from_dict(manager.positions[-1]["train"])
    assert (last.epoch, last.position) == (2, 0)
    middle = manager.positions[len(per_epoch) - 1]["train"]
    again = CFIterator(DataLoader(kind([share]), 2))
    again.load_state_dict(middle)
    assert [again.batch for _ in again.epochs(2) for _ in again] == list(range(len(per_epoch)))


def test_an_epoch_left_on_its_last_batch_is_over_for_the_next_run() -> None:
    iterator = rebuilt(Stateful([4]))
    for _ in iterator:
        if iterator.batch == 1:
            break
    iterator.finish()
    second = restored(iterator.state_dict(), Stateful([4]))
    assert [len(list(second)) for _ in second.epochs(2)] == [0, 2]


@pytest.mark.parametrize("claimed", [1, 3, 6, 40])
def test_a_wrong_length_loses_nothing(claimed: int) -> None:
    iterator = rebuilt(Sized([4, 3], claimed), num_workers=2)
    assert len(iterator) == -(-claimed // 2)
    manager = FakeManager()
    counted = CFIterator(
        DataLoader(Sized([4, 3], claimed), 2, num_workers=2), seed=9, cf_manager=manager
    )
    batches = []
    for _ in counted.epochs(1):
        for _ in counted:
            manager.weight_update()
            batches.append(counted.batch)
    assert batches == [0, 1, 2, 3]
    assert manager.events == ["first", "step", "step", "step", "end_epoch"]
    check_resumable(lambda: rebuilt(Sized([4, 3], claimed), num_workers=2), epochs=1)


def test_the_length_is_torchs() -> None:
    for batch, drop_last in ((3, False), (3, True), (None, False)):
        loader = DataLoader(Sized([7], 7), batch, drop_last=drop_last)
        assert len(CFIterator(loader)) == len(ResumableIterableLoader.like(loader)) == len(loader)
    with pytest.raises(TypeError, match="no length"):
        len(rebuilt(Opaque([1])))
    with pytest.raises(TypeError, match="Opaque has no length"):
        len(ResumableIterableLoader(Opaque([1])))


def test_both_loaders_take_torchs_seed_for_none() -> None:
    torch.manual_seed(5)
    for kind, dataset in ((ResumableIterableLoader, Opaque([1])), (ResumableDataLoader, Indexed())):
        seeds = [kind.like(DataLoader(dataset), seed=seed).identity.seed for seed in (None, 0, 7)]
        assert seeds == [5, 0, 7]


def test_persistent_workers_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    iterator = rebuilt(Opaque([2, 2]), num_workers=2, persistent_workers=True)
    served = [batch["id"][0].item() // 1_000_000 for _ in iterator.epochs(2) for batch in iterator]
    assert served == [0, 0, 1, 1]
    assert caplog.text.count("persistent_workers is ignored") == 1


# What a dataset sees


def split(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.shares = [0, 0]  # type: ignore[attr-defined]
    info.dataset.shares[worker] = 2 + worker  # type: ignore[attr-defined]


def test_worker_init_reaches_the_users_dataset() -> None:
    def make() -> CFIterator:
        return rebuilt(Opaque([0, 0]), 1, num_workers=2, worker_init_fn=split)

    assert len(list(make())) == 5
    check_resumable(make, epochs=1)


def test_only_the_loaders_own_state_is_saved() -> None:
    wrapped = ResumableIterableLoader(Stateful([4]))._batches
    assert isinstance(wrapped, WorkerBatches)
    assert wrapped.shares == [4]
    assert not hasattr(wrapped, "state_dict")


def test_skipping_is_counted_timed_and_explained(caplog: pytest.LogCaptureFixture) -> None:
    state = state_after(rebuilt(Opaque([8, 4]), num_workers=2), 5)
    list(restored(state, Opaque([8, 4]), num_workers=2))
    assert "skipped 5 batches by making their samples again, which took" in caplog.text
    caplog.clear()
    for kind in (Stateful, Walked):
        state = state_after(rebuilt(kind([8, 4]), num_workers=2), 5)
        list(restored(state, kind([8, 4]), num_workers=2))
        assert not caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_that_lost_its_state_is_refused(workers: int) -> None:
    state = state_after(rebuilt(Walked([8, 8]), num_workers=workers), 3)
    stateless = type("Walked", (Opaque,), {})  # another class under the same name
    with pytest.raises(NotResumableError, match="the iterator of Walked had state_dict"):
        list(restored(state, stateless([8, 8]), num_workers=workers))


def test_an_epoch_may_be_closed_while_it_skips() -> None:
    state = state_after(rebuilt(Opaque([8])), 2)
    loader = ResumableIterableLoader(Opaque([8]), 2, seed=9)
    deliveries = loader.open(epoch=0, start=2, state=state["states"][0])
    deliveries.close()
    deliveries.close()
    assert list(deliveries) == []
    assert len(list(loader.open(epoch=0, start=0))) == 4


def test_pinning_leaves_what_is_beside_the_data_alone() -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    item = WorkerItem(1, ItemKind.LAST, state='{"a":1}', data=["text"])
    assert pin_memory(item) == item
    assert type(pin_memory(item)) is WorkerItem


class WorkerSeeded(Opaque):
    """Draws from a generator of its own, seeded as torch's documents say."""

    def __iter__(self) -> Iterator[Any]:
        worker, count = self.share()
        info = get_worker_info()
        own = random.Random(info.seed if info else 0)
        return iter([100 * worker + own.random() for _ in range(count)])


def test_the_seeds_of_workers_are_the_same_after_a_restore() -> None:
    served = walk(rebuilt(WorkerSeeded([4, 3]), num_workers=2), epochs=2)
    assert len({one.digest for one in served}) == len(served)
    check_resumable(lambda: rebuilt(WorkerSeeded([4, 3]), num_workers=2))


class Eager(Opaque):
    """Draws all it serves as soon as it is asked for an iterator."""

    def __iter__(self) -> Iterator[Any]:
        return iter([random.random() for _ in range(self.share()[1])])


@pytest.mark.parametrize("workers", [0, 1])
def test_what_iter_draws_is_the_same_after_a_restore(workers: int) -> None:
    def make() -> CFIterator:
        random.random()  # the caller's generator stands elsewhere
        return rebuilt(Eager([5]), num_workers=workers)

    check_resumable(make)


class Failing(Opaque):
    def __iter__(self) -> Iterator[Any]:
        yield drawn(1)
        raise OSError("no such shard")


def test_an_error_while_looking_ahead_does_not_lose_the_boundary() -> None:
    manager = FakeManager()
    iterator = CFIterator(DataLoader(Failing([1])), cf_manager=manager)
    with pytest.raises(OSError, match="no such shard"):
        for _ in iterator:
            manager.weight_update()
    assert manager.events == ["first", "step"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_dataset_fails_with_its_own_error(workers: int) -> None:
    before = generators()
    with pytest.raises(OSError, match="no such shard"):
        list(rebuilt(Failing([1]), 1, num_workers=workers))
    assert generators() == before


class Secretive(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": [1, {2}]}


def test_a_state_that_cannot_be_saved_is_named() -> None:
    with pytest.raises(TypeError, match=r"state\['seen'\]\[1\] is a set"):
        list(rebuilt(Secretive([4])))


# Indexed sources


@pytest.mark.parametrize("kind", [Indexed, SelfIndexed])
def test_an_indexed_source_is_resumed_at_any_layout(kind: type[IterableDataset[int]]) -> None:
    loader = rebuilt(kind(), 4)
    assert isinstance(loader._adapter, ResumableDataLoader)
    assert len(loader) == 3
    assert [batch.tolist() for batch in loader] == [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]
    check_resumable(
        lambda: rebuilt(kind(), 4), make_resumed=lambda: rebuilt(kind(), 4, num_workers=2)
    )
    assert len(rebuilt(kind(), 4, drop_last=True)) == 2
    assert len(ResumableDataLoader(Indexed(), 5)) == 2
    assert isinstance(ResumableDataLoader(Indexed()).dataset, Squares)


def test_an_index_alone_does_not_replace_the_datasets_own_order() -> None:
    given = DataLoader(Subscriptable(), 4)
    iterator = CFIterator(given)
    assert isinstance(iterator._adapter, ResumableIterableLoader)
    assert [batch.tolist() for batch in iterator] == [batch.tolist() for batch in given]
    with pytest.raises(NotResumableError, match=r"without indexed_source\(\)"):
        ResumableDataLoader(Subscriptable())


# Refusals


CHANGED = [
    ("workers", {"num_workers": 1}, 2, 1),
    ("batch", {"batch": 3}, 2, 3),
    ("batch", {"batch": None}, 2, 0),
]


@pytest.mark.parametrize("kind", [Opaque, Stateful])
@pytest.mark.parametrize(("field", "changes", "expected", "found"), CHANGED)
def test_a_different_layout_is_refused_within_an_epoch_only(
    kind: type[Opaque], field: str, changes: dict[str, Any], expected: int, found: int
) -> None:
    first = rebuilt(kind([4, 4]), num_workers=2)
    state = state_after(first, 3)
    with pytest.raises(ResumeMismatchError, match="until the epoch ends") as refused:
        restored(state, kind([8]), **{"num_workers": 2, **changes})
    assert (refused.value.field, refused.value.expected, refused.value.found) == (
        field,
        expected,
        found,
    )
    assert (first.epoch, state["position"]) == (0, 3)
    list(first.steps(4))
    assert restored(first.state_dict(), kind([8]), **{"num_workers": 1, **changes}).epoch == 1


def test_a_different_world_is_refused() -> None:
    def rank(index: int, world: int) -> CFIterator:
        loader = ResumableIterableLoader(Stateful([8]), 2, rank=index, world=world)
        return CFIterator(loader)

    ranks = [rank(0, 2), rank(1, 2)]
    parts = [state_after(one, 2) for one in ranks]
    merged = rank(0, 1).merged_state(parts)
    with pytest.raises(ResumeMismatchError, match="world is 1, but the position was saved with 2"):
        rank(0, 1).load_state_dict(merged)
    with pytest.raises(ResumeMismatchError, match=r"with 1\. .* of all ranks, in rank order"):
        rank(1, 2).load_state_dict(parts[1])
    again = [rank(0, 2), rank(1, 2)]
    for one, other in zip(ranks, again, strict=True):
        other.load_state_dict(merged)
        assert [digest(batch) for batch in other] == [digest(batch) for batch in one.steps(4)]


def test_a_world_may_change_between_epochs() -> None:
    first = CFIterator(ResumableIterableLoader(Stateful([2]), 2))
    state = state_after(first, 1)
    for rank in range(2):
        second = CFIterator(ResumableIterableLoader(Stateful([2]), 2, rank=rank, world=2))
        second.load_state_dict(state)
        assert len(list(second)) == 1


def test_a_different_dataset_or_way_is_refused() -> None:
    with pytest.raises(ResumeMismatchError, match="algorithm is .* the same methods"):
        restored(state_after(rebuilt(Stateful([8])), 2), Opaque([8]))
    with pytest.raises(ResumeMismatchError, match="fingerprint"):
        restored(state_after(rebuilt(Opaque([8])), 2), Sized([8], 9))


def damaged(**changes: Any) -> dict[str, Any]:
    position = Position.from_dict(state_after(rebuilt(Stateful([8])), 2))
    return replace(position, states=({**position.states[0], **changes},)).to_dict()


@pytest.mark.parametrize(
    "changes",
    [
        {"made": [3]},
        {"made": [-2]},
        {"made": [2.0]},
        {"made": [1, 1]},
        {"made": None},
        {"ended": [0]},
        {"ended": [True]},
        {"turn": 1},
        {"turn": "0"},
        {"states": [""]},
        {"states": [7]},
        {"states": ["{"]},
        {"states": ['{"$":"array"}']},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(changes: dict[str, Any]) -> None:
    state = damaged(**changes)
    iterator = rebuilt(Stateful([8]))
    before = iterator.state_dict()
    with pytest.raises(CorruptPositionError):
        iterator.load_state_dict(state)
    assert iterator.state_dict() == before


def test_states_of_a_different_shape_are_refused() -> None:
    position = Position.from_dict(state_after(rebuilt(Stateful([8])), 2))
    for states in ((), (None,), ([],), ({},), position.states * 2):
        with pytest.raises(CorruptPositionError):
            rebuilt(Stateful([8])).load_state_dict(replace(position, states=states).to_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_that_became_shorter_is_refused(workers: int) -> None:
    state = state_after(rebuilt(Opaque([8, 8]), num_workers=workers), 3)
    with pytest.raises(ResumeMismatchError, match="must yield the same samples again"):
        list(restored(state, Opaque([2, 2]), num_workers=workers))


def test_batches_that_overtake_each_other_are_refused() -> None:
    with pytest.raises(NotResumableError, match="in_order=False batches overtake"):
        rebuilt(Opaque([1]), num_workers=1, in_order=False)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_data_pipe_is_refused() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    with pytest.raises(NotResumableError, match="is a DataPipe, which DataLoader itself"):
        CFIterator(DataLoader(IterableWrapper(range(4))))


class Uncopyable(Opaque):
    def __init__(self) -> None:
        super().__init__([2])
        self.stream = iter(range(2) if self.shares else [])
        self.opened = (one for one in self.stream)


def test_a_dataset_that_cannot_be_copied_needs_a_worker() -> None:
    with pytest.raises(NotResumableError, match="Uncopyable cannot be copied .*num_workers=1"):
        rebuilt(Uncopyable())
    forked = rebuilt(Uncopyable(), num_workers=1, multiprocessing_context="fork")
    assert len(list(forked)) == 1


# torchdata's loader as the engine


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Opaque, Stateful])
def test_torchdatas_loader_runs_an_iterable_dataset(kind: type[Opaque], workers: int) -> None:
    def make() -> CFIterator:
        loader = StatefulDataLoader(kind([5, 2]), 2, num_workers=workers, snapshot_every_n_steps=3)
        return CFIterator(loader, seed=9)

    adapter = make()._adapter
    assert isinstance(adapter, ResumableIterableLoader)
    engine = adapter._make_engine()
    assert type(engine) is StatefulDataLoader
    assert engine.snapshot_every_n_steps == 3
    check_resumable(make)
    plain = walk(rebuilt(kind([5, 2]), num_workers=workers), epochs=2)
    assert walk(make(), epochs=2) == plain


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_runs_a_map_style_dataset(workers: int, persistent: bool) -> None:
    def make(workers: int = workers) -> CFIterator:
        loader = StatefulDataLoader(
            Augmented(7),
            2,
            shuffle=True,
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
            snapshot_every_n_steps=2,
        )
        return CFIterator(loader, seed=9)

    adapter = make()._adapter
    assert isinstance(adapter, ResumableDataLoader)
    assert type(adapter._engine) is StatefulDataLoader
    assert adapter._engine.snapshot_every_n_steps == 2
    check_resumable(make, make_resumed=lambda: make(2 - workers))
    iterator = make()
    plain = walk(rebuilt(Augmented(7), shuffle=True, num_workers=workers), epochs=2)
    assert walk(iterator, epochs=2) == plain
    iterator.finish()


def test_a_subclass_of_torchdatas_loader_that_serves_in_its_own_way_is_refused() -> None:
    class Own(StatefulDataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([])

    with pytest.raises(NotResumableError, match="Own overrides DataLoader.__iter__"):
        CFIterator(Own(Augmented(3)))


# Killed

KILLED = """
import json, os, signal, sys
from torch.utils.data import DataLoader
from iterators import CFIterator
from iterators.testing import digest
from tests.iterators import streams

path, kind, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
saved = json.load(open(path)) if os.path.exists(path) else {"history": []}
loader = DataLoader(getattr(streams, kind)([7, 4]), 2, num_workers=2)
iterator = CFIterator(loader, seed=9)
if "position" in saved:
    iterator.load_state_dict(saved["position"])
for served, batch in enumerate(iterator.steps(12), start=1):
    if served > 1:
        saved["position"] = iterator.state_dict()
        with open(path + ".new", "w") as file: json.dump(saved, file)
        os.replace(path + ".new", path)
    saved["history"].append(digest(batch))
    if served == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
json.dump(saved, open(path, "w"))
"""


@pytest.mark.crash
@pytest.mark.parametrize("kind", [Opaque, Stateful])
def test_a_killed_process_continues_with_the_same_batches(
    kind: type[Opaque], tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    for kill_at in (4, 3, 0):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(saved), kind.__name__, str(kill_at)],
            check=False,
            cwd=Path(iterators.__file__).parent.parent,
            timeout=400,
        )
        assert done.returncode == (-signal.SIGKILL if kill_at else 0)
    history = json.loads(saved.read_text())["history"]
    whole = walk(rebuilt(kind([7, 4]), num_workers=2), epochs=2)
    assert history == [one.digest for one in whole]
