"""The DALI adapter: what it takes over, what it throws away, what it checks, what it refuses."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline, fn, ops, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, DALIGenericIterator

from iterators import (
    CFIterator,
    IterationStateError,
    NotResumableError,
    ResumeMismatchError,
)
from iterators.dali import DALILoader, FileReader
from iterators.dali.graph import sole_source
from iterators.testing import digest, walk
from tests.iterators.dali.native_pipelines import put, write_images
from tests.iterators.dali.pipelines import (
    KEYS,
    augmented,
    built,
    last_line_of,
    reader,
    resumable,
    served,
)


class Counting(DALIGenericIterator):
    """Counts the batches that were asked of it."""

    asked = 0

    def __next__(self) -> Any:
        self.asked += 1
        return super().__next__()


def counting(files: list[str], batch: int, **settings: Any) -> Counting:
    return Counting(augmented(reader(files, **settings), batch), KEYS)


# Entering


def test_a_pause_throws_nothing_away_and_a_different_place_what_was_prefetched(
    paths: list[str],
) -> None:
    iterator = counting(paths[:12], 3)
    loader = DALILoader(iterator)
    assert list(loader.open(epoch=0, start=12)) == []
    assert iterator.asked == 0
    parts = [served(loader, epoch=0, start=start, at_most=1) for start in (0, 3, 6, 9)]
    assert iterator.asked == 4
    assert list(chain.from_iterable(parts)) == served(DALILoader(built(paths[:12], 3)), epoch=0)
    iterator = counting(paths[:40], 2)
    served(DALILoader(iterator), epoch=0, start=30)
    assert iterator.asked == 5 + 3


@pytest.mark.parametrize("taken", [1, 4])
def test_an_iterator_that_someone_else_used_is_entered_all_the_same(
    paths: list[str], taken: int
) -> None:
    iterator = built(paths[:10], 3)
    for _ in range(taken):
        next(iterator)
    loader = DALILoader(iterator)
    for epoch in (1, 0):
        expected = served(DALILoader(built(paths[:10], 3)), epoch=epoch)
        assert served(loader, epoch=epoch) == expected
    first = loader.open(epoch=0, start=0)
    next(first)
    loader.open(epoch=1, start=0)
    assert list(first) == []


# One owner


def test_of_two_loaders_over_one_iterator_the_later_has_it(paths: list[str]) -> None:
    iterator = built(paths[:10], 3)
    first = CFIterator(iterator, seed=9)
    served_first = [digest(next(one)) for one in [iter(first)] for _ in range(2)]
    later = CFIterator(iterator, seed=9)
    with pytest.raises(IterationStateError, match="a second DALILoader or CFIterator"):
        list(first)
    whole = [one.digest for one in walk(resumable(paths[:10], 3), epochs=1)]
    assert served_first == whole[:2]
    assert [digest(data) for data in later] == whole


@pytest.mark.parametrize(("taken", "pipeline"), [(3, {}), (2, {"exec_dynamic": False})], ids=str)
def test_batches_taken_in_mid_epoch_are_noticed_and_served_after_all(
    paths: list[str], taken: int, pipeline: dict[str, Any]
) -> None:
    whole = [one.digest for one in walk(resumable(paths[:23], 3), epochs=1)]
    dali = built(paths[:23], 3, pipeline=pipeline)
    iterator = CFIterator(dali, seed=9, audit=True)
    loop = iter(iterator)
    found = [digest(next(loop)) for _ in range(2)]
    for _ in range(taken):
        next(dali)
    with pytest.raises(IterationStateError, match="does other code use the iterator"):
        next(loop)
    found += [digest(data) for data in iterator]
    assert found == whole
    iterator.finish()
    assert iterator.last_report is not None
    assert iterator.last_report.exact


def test_a_pipeline_is_let_go_with_its_iterator(paths: list[str]) -> None:
    iterator = resumable(paths[:10], 3)
    loader: Any = iterator._adapter
    pipeline = weakref.ref(loader._pipeline)
    gc.collect()
    gc.disable()
    try:
        next(iter(iterator))
        opened = loader.open(epoch=3, start=0)
        next(opened)
        opened.close()
        del iterator, loader, opened
        assert pipeline() is None
    finally:
        gc.enable()


# Under CFIterator


def test_a_reader_without_a_seed_takes_torchs_and_gives_way_to_a_restored_runs(
    paths: list[str],
) -> None:
    torch.manual_seed(7)
    first = CFIterator(built(paths[:10], 4))
    assert walk(first, epochs=1) == walk(CFIterator(built(paths[:10], 4, seed=7)), epochs=1)
    torch.manual_seed(8)
    resumed = CFIterator(built(paths[:10], 4))
    assert resumed.state_dict()["seed"] == 8
    resumed.load_state_dict(first.state_dict())
    assert resumed.state_dict()["seed"] == 7
    assert walk(resumed, epochs=2) == walk(CFIterator(built(paths[:10], 4, seed=7)), epochs=2)[3:]


def test_other_files_are_refused(paths: list[str]) -> None:
    state = resumable(paths[:10], 4).state_dict()
    with pytest.raises(ResumeMismatchError, match="fingerprint"):
        resumable(paths[1:11], 4).load_state_dict(state)
    resumable(paths[:10], 2, fingerprint="same")
    with pytest.raises(ResumeMismatchError, match="algorithm"):
        resumable(paths[:10], 4, shuffle=False).load_state_dict(state)


# Tails


@pytest.mark.parametrize(("n", "world", "batch"), [(26, 4, 6), (1, 4, 3)])
def test_no_rank_gets_an_empty_batch(paths: list[str], n: int, world: int, batch: int) -> None:
    counted: list[int] = []
    for rank in range(world):
        loader = DALILoader(built(paths[:n], batch, shard_id=rank, num_shards=world))
        assert (loader.rank, loader.layout.world, loader.layout.batch) == (rank, world, batch)
        for delivery in loader.open(epoch=0, start=0):
            (parts,) = delivery.data
            assert delivery.ids is not None
            assert delivery.weights is not None
            assert {len(one) for one in parts.values()} == {len(delivery.ids)}
            assert len(delivery.ids) >= 1
            assert parts["weight"].flatten().tolist() == delivery.weights.tolist()
            counted += delivery.ids[delivery.weights > 0].tolist()
    assert sorted(counted) == list(range(n))


# The original's shape


class TrainPipe(Pipeline):  # type: ignore[misc]
    """As in the original's training script, without its coin flip."""

    def __init__(self, batch: int, root: Path, *, shard: int = 0, shards: int = 1, **resume: Any):
        super().__init__(batch, 1, None, seed=12)
        self.input = FileReader(file_root=root, shard_id=shard, num_shards=shards, **resume)
        self.decode = ops.decoders.Image(device="cpu", output_type=types.RGB)
        self.resize = ops.Resize(device="cpu", size=[8, 8])
        self.normalise = ops.CropMirrorNormalize(device="cpu", dtype=types.FLOAT)

    def define_graph(self) -> list[Any]:
        jpegs, labels = self.input(name="Reader")
        return [self.normalise(self.resize(self.decode(jpegs))), labels]


def test_the_originals_script_resumes_where_it_is_told(images: Path) -> None:
    whole = CFIterator(DALIClassificationIterator(TrainPipe(3, images, shard=1, shards=2)))
    expected = [one.digest for one in walk(whole, epochs=2)]
    for batches in (0, 5):
        how = {"resume_index": batches * 3, "resume_epoch": 1, "cf_det": True}
        pipe = TrainPipe(3, images, shard=1, shards=2, **how)
        resumed = CFIterator(DALIClassificationIterator(pipe))
        assert resumed.epoch == 1
        assert [digest(data) for data in resumed] == expected[7 + batches :]
        list(resumed)
        assert resumed.last_report is not None
        assert resumed.last_report.exact


@pytest.mark.parametrize(("index", "left"), [(32, 4), (1000, 3)])
def test_a_resumed_script_serves_the_epochs_after_it(images: Path, index: int, left: int) -> None:
    pipe = TrainPipe(16, images, resume_index=index, resume_epoch=1)
    resumed = walk(CFIterator(DALIClassificationIterator(pipe)), epochs=3)
    whole = walk(CFIterator(DALIClassificationIterator(TrainPipe(16, images))), epochs=3)
    assert [(one.epoch, one.batch, one.digest) for one in resumed] == [
        (one.epoch, one.batch, one.digest) for one in whole[-left:]
    ]


def test_the_reader_works_without_cfiterator_and_forgets(images: Path) -> None:
    pipe = TrainPipe(2, images)
    iterator = DALIClassificationIterator(pipe, auto_reset=True)
    found = [digest(data) for _ in range(2) for data in iterator]
    whole = CFIterator(DALIClassificationIterator(TrainPipe(2, images)))
    assert found == [one.digest for one in walk(whole, epochs=2)]
    assert sole_source(pipe).num_produced <= 4


# What was delivered


class Tampering(DALIGenericIterator):
    """Loses the last sample of every batch, or takes the wrong ones."""

    change: Callable[[dict[str, Any]], dict[str, Any]]

    def __next__(self) -> Any:
        return [self.change(super().__next__()[0])]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda batch: {**batch, "id": batch["id"] + 1}, "delivered a different id in 'id'"),
        (
            lambda batch: {key: one[:-1] for key, one in batch.items()},
            "delivered 3 samples in 'data' where the reader prod",
        ),
    ],
    ids=["another", "one lost"],
)
def test_a_batch_of_other_samples_is_noticed(paths: list[str], change: Any, reason: str) -> None:
    iterator = Tampering(augmented(reader(paths[:10]), 4), KEYS)
    iterator.change = change
    with pytest.raises(RuntimeError, match=reason):
        list(DALILoader(iterator).open(epoch=0, start=0))


@pytest.mark.parametrize("settings", [{}, {"exec_dynamic": False}])
def test_a_file_that_cannot_be_read_is_among_those_named(
    paths: list[str], tmp_path: Path, settings: dict[str, Any]
) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    files = [*paths[:12], "broken.jpg"]
    loader = DALILoader(built(files, 1, file_root=tmp_path, seed=1, pipeline=settings))
    with pytest.raises(RuntimeError, match="Critical error") as failure:
        list(loader.open(epoch=0, start=0))
    note = last_line_of(failure.value)
    assert note.startswith("DALI was reading one of: broken.jpg")
    assert note.endswith("build the pipeline again)") == bool(settings)


@pytest.fixture
def breakable(tmp_path: Path) -> list[str]:
    """Images of this test alone."""
    return write_images(tmp_path, 26)


@pytest.mark.parametrize(("broken", "prepare", "depth"), [([5, 10, 15], False, 2), ([9], True, 3)])
def test_files_of_batches_that_are_thrown_away_may_be_broken(
    breakable: list[str], broken: list[int], prepare: bool, depth: int
) -> None:
    """As many as were prefetched leave the queue empty; the right batches follow all the same."""
    expected = served(DALILoader(built(breakable, 4, shuffle=False)), epoch=0)
    contents = {breakable[index]: Path(breakable[index]).read_bytes() for index in broken}
    for name in contents:
        put(name, b"no picture")
    loader = DALILoader(
        built(
            *(breakable, 4),
            shuffle=False,
            pipeline={"prefetch_queue_depth": depth},
            iterator={"prepare_first_batch": prepare},
        )
    )
    for start in (16, 20):
        assert served(loader, epoch=0, at_most=1) == expected[:4]
        assert served(loader, epoch=0, start=start) == expected[start:]
    for name, content in contents.items():
        put(name, content)
    assert served(loader, epoch=0) == expected


def test_a_caught_exception_loses_and_repeats_nothing(breakable: list[str]) -> None:
    whole = [one.digest for one in walk(resumable(breakable, 4), epochs=1)]
    iterator = CFIterator(built(breakable, 4), seed=9, audit=True)
    file = Path(breakable[int(iterator._adapter.order(0).ids(13)[0])])  # type: ignore[union-attr]
    content = file.read_bytes()
    put(file, b"no picture")
    found: list[str] = []
    with pytest.raises(RuntimeError, match="Critical error"):
        found.extend(map(digest, iterator))
    put(file, content)
    found.extend(map(digest, iterator))
    assert found == whole
    iterator.finish()
    assert iterator.last_report is not None
    assert iterator.last_report.exact


# Refusals


def defined(define: Callable[[], Any], **settings: Any) -> Any:
    return pipeline_def(define, batch_size=4, num_threads=1, device_id=None, **settings)()


def pictures(encoded: Any) -> Any:
    return fn.resize(fn.decoders.image(encoded), size=[6, 6])


def several_pipelines(images: Path) -> Any:
    return [TrainPipe(4, images, shard=shard, shards=2) for shard in range(2)]


def dalis_own_reader(images: Path) -> Any:
    def define() -> Any:
        encoded, label = fn.readers.file(file_root=str(images), name="Reader")
        return pictures(encoded), label

    return defined(define)


def two_readers(images: Path) -> Any:
    readers = [FileReader(file_root=images) for _ in range(2)]
    return defined(lambda: tuple(pictures(one()[0]) for one in readers))


def a_source_beside_it(images: Path) -> Any:
    def define() -> Any:
        encoded, label = FileReader(file_root=images)()
        extra = fn.external_source(lambda: np.zeros((4, 1), dtype=np.int32), batch=True)
        return pictures(encoded), label + extra

    return defined(define)


def an_operator_of_random_numbers(images: Path) -> Any:
    def define() -> Any:
        encoded, label = FileReader(file_root=images)()
        return fn.flip(pictures(encoded), horizontal=fn.random.coin_flip()), label

    return defined(define)


def a_python_function(images: Path, native_random: bool = False) -> Any:
    def define() -> Any:
        encoded, label = FileReader(file_root=images, native_random=native_random)()
        return pictures(encoded), fn.python_function(label, function=lambda one: one)

    return defined(define)


@pytest.mark.filterwarnings("ignore:Please set `reader_name`", "ignore:The external source node")
@pytest.mark.parametrize(
    ("make", "settings", "reason"),
    [
        (several_pipelines, {"size": 40}, "runs 2 pipelines"),
        (lambda images: TrainPipe(4, images), {"size": 40}, "leave size and reader_name out"),
        (
            dalis_own_reader,
            {"reader_name": "Reader"},
            r"reads with fn.readers.file, .*NativeDALILoader\(make\)",
        ),
        (two_readers, {}, "has 2 FileReaders"),
        (a_source_beside_it, {}, "also fed by fn.external_source"),
        (an_operator_of_random_numbers, {}, r"\(fn.random.coin_flip\), which would .*num_uniforms"),
        (a_python_function, {}, r"runs Python code \(fn.python_function\), whose random numbers"),
    ],
)
def test_what_cannot_be_entered_anywhere_is_refused(
    images: Path, make: Any, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotResumableError, match=reason):
        CFIterator(DALIGenericIterator(make(images), ["data", "label"], **settings))


def test_native_random_takes_what_may_draw_and_a_loader_cannot_be_opened_beside_itself(
    images: Path,
) -> None:
    pipe = a_python_function(images, native_random=True)
    iterator = CFIterator(DALIGenericIterator(pipe, ["data", "label"]))
    assert len(next(iter(iterator))[0]["label"]) == 4
    with pytest.raises(NotResumableError, match="DALILoader cannot be opened beside itself"):
        iterator.evaluate()


# Forks


def test_a_fork_leaves_the_pipelines_that_its_parent_dropped_to_the_parent(
    paths: list[str],
) -> None:
    """A loader worker whose garbage collector ends one waits for threads that it does not have."""
    gc.disable()
    try:
        dropped: list[Any] = [built(paths[:6], 3, seed=0)]
        next(dropped[0])
        dropped.append(dropped)
        del dropped
        fork = multiprocessing.get_context("fork").Process(target=gc.collect)
        fork.start()
        fork.join(60.0)
        fork.kill()
        fork.join()
        assert fork.exitcode == 0
    finally:
        gc.enable()
