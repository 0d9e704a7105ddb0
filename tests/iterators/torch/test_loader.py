"""The map-style adapter: what is shared, what is rebuilt, what is refused."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from iterators import CFIterator, NotResumableError, ResumableDataLoader, ResumeMismatchError
from iterators.order.fingerprint import dataset_fingerprint
from iterators.testing import digest
from iterators.torch.worker_start import WorkerStart
from tests.iterators.datasets import Augmented, Folder, Plain


def ids_of(loader: ResumableDataLoader, *, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [
        one.ids.tolist() for one in loader.open(epoch=epoch, start=start) if one.ids is not None
    ]


def generators() -> str:
    return digest([torch.get_rng_state(), repr(random.getstate()), list(np.random.get_state())])  # type: ignore[arg-type]


# Sharing out


# Seeding


def test_loading_leaves_the_callers_generators_alone() -> None:
    before = generators()
    for _ in ResumableDataLoader(Augmented(7), 3, shuffle=True).open(epoch=0, start=0):
        assert generators() == before
    with pytest.raises(OSError, match="no such file"):
        next(iter(ResumableDataLoader(Failing(2), 2).open(epoch=0, start=0)))
    assert generators() == before


class Failing(Plain):
    def __getitem__(self, index: int) -> int:
        raise OSError("no such file")


def test_generators_that_are_not_seeded_are_the_callers() -> None:
    loader = ResumableDataLoader(Augmented(4), 4, seeded=("torch",))
    random.seed(1)
    expected = [random.random() for _ in range(4)]
    random.seed(1)
    (delivery,) = loader.open(epoch=0, start=0)
    assert delivery.data["python"].tolist() == expected


def test_augmentation_depends_on_seed_epoch_and_sample_alone() -> None:
    def samples(**changes: Any) -> dict[int, str]:
        arguments = {"batch_size": 4, "seed": 1, "shuffle": True, "epoch": 3, **changes}
        epoch = arguments.pop("epoch")
        loader = ResumableDataLoader(Augmented(11), **arguments, collate_fn=list)
        parts = [part.data for part in loader.open(epoch=epoch, start=0)]
        return {sample["id"]: digest(sample) for part in parts for sample in part}

    base = samples()
    assert len(set(base.values())) == 11
    assert samples(batch_size=3, num_workers=2, shuffle=False) == base
    half = {**samples(rank=0, world=2), **samples(rank=1, world=2)}
    assert half == base
    assert not set(samples(seed=2).values()) & set(base.values())
    assert not set(samples(epoch=4).values()) & set(base.values())


def test_a_random_collate_function_gives_the_same_bits_for_any_worker_count() -> None:
    def served(workers: int) -> list[str]:
        loader = ResumableDataLoader(
            Augmented(9), 4, shuffle=True, num_workers=workers, collate_fn=mixing
        )
        return [digest(one.data) for one in loader.open(epoch=1, start=4)]

    before = generators()
    assert served(0) == served(2)
    assert generators() == before


def mixing(samples: list[dict[str, Any]]) -> Any:
    return torch.rand(3) + len(samples)


# Datasets


def test_worker_init_reaches_the_users_dataset_that_was_pickled() -> None:
    loader = ResumableDataLoader(
        Tagged(), 2, num_workers=1, worker_init_fn=tag, multiprocessing_context="spawn"
    )
    assert [one.data.tolist() for one in loader.open(epoch=0, start=0)] == [[70, 71], [72]]


class Tagged(Plain):
    def __init__(self) -> None:
        super().__init__(3)
        self.tag = 0

    def __getitem__(self, index: int) -> int:
        return self.tag + index


def tag(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.dataset.n == 3  # type: ignore[attr-defined]
    info.dataset.tag = 70  # type: ignore[attr-defined]


def test_an_unbatched_loader_stays_unbatched() -> None:
    loader = ResumableDataLoader.like(DataLoader(Plain(3), batch_size=None))
    assert [one.data for one in loader.open(epoch=0, start=1)] == [1, 2]


# Orders


def test_the_users_own_order_replaces_ours_and_gives_each_epoch_its_length() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [seed, epoch, 0, 0][: 4 - epoch]

    loader = ResumableDataLoader(Plain(9), 3, seed=4, order=order)
    assert len(loader) == 2
    assert ids_of(loader) == [[4, 0, 0], [0]]
    assert ids_of(loader, epoch=1) == [[4, 1, 0]]
    assert loader.batches_left(0) == 1
    assert loader.identity.algorithm == "listed-1"


def test_an_epoch_that_goes_on_needs_the_samples_that_it_began_with() -> None:
    dataset = Plain(9)
    loader = ResumableDataLoader(dataset, 3, shuffle=True, seed=1)
    whole = ids_of(loader, epoch=1)
    dataset.n = 12  # grows in mid-epoch
    assert ids_of(loader, epoch=1, start=3)[0] == whole[1]
    dataset.n = 8
    with pytest.raises(ResumeMismatchError, match="length of the data in epoch 1"):
        loader.open(epoch=1, start=3)
    loader.measure()
    assert sorted(chain.from_iterable(ids_of(loader, epoch=2))) == list(range(8))
    resumed = ResumableDataLoader(Plain(30), 3, shuffle=True, seed=1)
    resumed.measure(9)
    assert ids_of(resumed, epoch=1, start=3)[0] == whole[1]


# Rebuilding a given loader


def test_a_rebuilt_loader_keeps_every_other_setting() -> None:
    kept = {"num_workers": 1, "timeout": 7, "prefetch_factor": 5, "persistent_workers": True}
    loader = DataLoader(
        Plain(10),
        batch_size=3,
        shuffle=True,
        collate_fn=tuple,
        worker_init_fn=tag,
        multiprocessing_context="spawn",
        drop_last=True,
        **kept,
    )
    rebuilt = ResumableDataLoader.like(loader, seed=3)
    engine = rebuilt._engine
    assert {name: getattr(engine, name) for name in kept} == kept
    assert engine.multiprocessing_context is loader.multiprocessing_context
    assert engine.worker_init_fn == WorkerStart(tag)
    assert (rebuilt.identity.algorithm, rebuilt.identity.tail) == ("feistel-1", "drop")
    assert (rebuilt.identity.seed, rebuilt.layout.batch, len(rebuilt)) == (3, 3, 3)


def test_samplers_of_torchs_say_rank_world_shuffle_batch_size_and_tail() -> None:
    for shuffle, algorithm in ((True, "feistel-1"), (False, "sequential-1")):
        sampler = DistributedSampler(Plain(10), num_replicas=3, rank=2, shuffle=shuffle)
        loader = ResumableDataLoader.like(DataLoader(sampler.dataset, 2, sampler=sampler))
        assert (loader.rank, loader.layout.world) == (2, 3)
        assert loader.identity.algorithm == algorithm
    batches = BatchSampler(RandomSampler(Plain(10)), 4, drop_last=True)
    loader = ResumableDataLoader.like(DataLoader(Plain(10), batch_sampler=batches))
    assert (loader.layout.batch, loader.identity.tail, len(loader)) == (4, "drop", 2)


class Changed(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter([1, 2])


class OwnBatches(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[1, 2]])


class OwnOrder(SubsetRandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


REFUSED: list[tuple[Callable[[], DataLoader[Any]], str]] = [
    (lambda: Changed(Plain(3)), "Changed overrides DataLoader.__iter__"),
    (lambda: DataLoader(Plain(3), num_workers=1, in_order=False), "in_order=False batches"),
    (
        lambda: DataLoader(Plain(3), batch_sampler=OwnBatches(Plain(3), 2, False)),  # type: ignore[arg-type]
        "OwnBatches decides by its own rules",
    ),
    (
        lambda: DataLoader(Plain(3), sampler=OwnOrder([0, 1])),
        r"the custom sampler OwnOrder cannot be entered .* "
        r"order=lambda seed, epoch: ids, .*; to train on part of a dataset, use",
    ),
    (
        lambda: DataLoader(Plain(9), sampler=DistributedSampler(Plain(3), 1, 0)),
        "DistributedSampler over other data than the loader's",
    ),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED)
def test_a_loader_that_cannot_be_resumed_is_refused_with_the_reason(
    make: Callable[[], DataLoader[Any]], reason: str
) -> None:
    with pytest.raises(NotResumableError, match=reason):
        CFIterator(make())


class KillsItsWorker(Plain):
    """Sample 9 kills the worker that loads it, once."""

    def __init__(self, n: int, marker: Path) -> None:
        super().__init__(n)
        self.marker = marker

    def __getitem__(self, index: int) -> int:
        if index == 9 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class TerminatedInALock(Plain):
    """Sample 3 terminates the worker that loads it, while it holds a lock of the trainer's."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.lock = multiprocessing.Lock()
        self.may_go_on = multiprocessing.Event()

    def __getitem__(self, index: int) -> int:
        if index == 3:
            self.may_go_on.wait(30)
            with self.lock:
                os.kill(os.getpid(), signal.SIGTERM)
        return index


def test_a_worker_that_is_terminated_releases_its_locks() -> None:
    dataset = TerminatedInALock(8)
    loader = DataLoader(
        dataset, 2, num_workers=1, multiprocessing_context="fork", worker_init_fn=WorkerStart(None)
    )
    batches: Any = iter(loader)
    (worker,) = batches._workers
    # Torch's handler of SIGCHLD raises wherever the test is then: nobody is to fetch from it.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        dataset.may_go_on.set()
        worker.join()
        assert dataset.lock.acquire(timeout=5)
        batches._shutdown_workers()
    finally:
        signal.signal(signal.SIGCHLD, before)


# torchdata 0.11 still calls what torch 2.13 deprecates.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_dead_persistent_worker_is_replaced_by_the_next_loop(kind: Any, tmp_path: Path) -> None:
    dataset = KillsItsWorker(20, tmp_path / "killed")
    given = kind(dataset, 2, num_workers=2, persistent_workers=True, collate_fn=list)
    iterator = CFIterator(given)
    served: list[int] = []
    with pytest.raises((RuntimeError, OSError, EOFError)):  # how torch notices is a race
        served.extend(one for batch in iterator for one in batch)
    served.extend(one for batch in iterator for one in batch)
    iterator.finish()
    assert served == list(range(20))
    assert not multiprocessing.active_children()


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="seeded must be a collection"):
        ResumableDataLoader(Plain(3), seeded=("cuda",))
    with pytest.raises(ValueError, match="would serve nothing"):
        ResumableDataLoader(Plain(3), 4, tail="drop")


# Fingerprints

NAMES = ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"]


def test_swapped_renamed_shrunk_and_relabelled_folders_are_other_data_and_a_moved_one_is_not() -> (
    None
):
    base, relabelled = Folder("/a", NAMES), Folder("/a", NAMES)
    renamed = Folder("/a", ["cat/1.jpg", "cat/3.jpg", "dog/1.jpg"])
    relabelled.samples[0] = (relabelled.samples[0][0], 9)
    long = [Folder("/a", [*("x.jpg",) * 5_000, last]) for last in ("a.jpg", "b.jpg")]
    others = [Folder("/a", NAMES[:2]), Folder("/a", NAMES[::-1]), Plain(3), Augmented(3)]
    several = [base, renamed, relabelled, *long, *others]
    assert len({dataset_fingerprint(one) for one in several}) == len(several)
    assert dataset_fingerprint(Folder("/b/c", NAMES)) == dataset_fingerprint(base)


def test_subsets_and_concatenations_are_followed() -> None:
    one, other = (Subset(Plain(9), ids) for ids in ([1, 2], [1, 3]))
    both = [ConcatDataset([one, other]), ConcatDataset([other, one])]
    assert len({dataset_fingerprint(data) for data in (one, other, *both)}) == 4
    assert dataset_fingerprint(one) == dataset_fingerprint(Subset(Plain(9), [1, 2]))


# What a CFIterator hands on


def test_public_attributes_are_those_of_the_loader() -> None:
    given = DataLoader(Plain(6), 2, shuffle=True, num_workers=1)
    iterator = CFIterator(given)
    assert iterator.dataset is given.dataset
    assert (iterator.batch_size, iterator.num_workers, iterator.drop_last) == (2, 1, False)
    with pytest.raises(AttributeError, match="CFIterator has no attribute 'bach', nor has its Dat"):
        _ = iterator.bach
    assert not hasattr(iterator, "_index_sampler")
