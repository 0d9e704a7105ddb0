"""The DALI adapter: what it takes over, what it throws away, what it checks, what it refuses."""

from __future__ import annotations

import gc
import multiprocessing
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline, fn, ops, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, DALIGenericIterator

from iterators import CFIterator, IterationStateError, NotResumableError, ResumeMismatchError
from iterators.dali import DALILoader, FileReader
from iterators.testing import digest, walk
from tests.iterators.dali.native_pipelines import put, write_images
from tests.iterators.dali.pipelines import KEYS, augmented, built, last_line_of, reader, resumable

# Entering


# One owner


@pytest.mark.parametrize(("taken", "pipeline"), [(3, {}), (2, {"exec_dynamic": False})], ids=str)
def test_batches_taken_by_others_are_noticed_and_served_after_all(
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
    next(iter(iterator))
    assert [digest(data) for data in CFIterator(dali, seed=9)] == whole
    with pytest.raises(IterationStateError, match="a second DALILoader or CFIterator"):
        list(iterator)


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
        how: dict[str, Any] = {"resume_index": batches * 3, "resume_epoch": 1, "cf_det": True}
        pipe = TrainPipe(3, images, shard=1, shards=2, **how)
        resumed = CFIterator(DALIClassificationIterator(pipe))
        assert resumed.epoch == 1
        assert [digest(data) for data in resumed] == expected[7 + batches :]
        list(resumed)
        assert resumed.last_report is not None
        assert resumed.last_report.exact


# What was delivered


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda batch: {**batch, "id": batch["id"] + 1}, "delivered a different id in 'id'"),
        (lambda batch: {key: one[:-1] for key, one in batch.items()}, "delivered 3 samples in"),
    ],
    ids=["another", "one lost"],
)
def test_a_batch_of_other_samples_is_noticed(paths: list[str], change: Any, reason: str) -> None:
    class Tampering(DALIGenericIterator):
        def __next__(self) -> Any:
            return [change(super().__next__()[0])]

    iterator = Tampering(augmented(reader(paths[:10]), 4), KEYS)
    with pytest.raises(RuntimeError, match=reason):
        list(DALILoader(iterator).open(epoch=0, start=0))


def test_a_caught_exception_names_files_and_loses_and_repeats_nothing(tmp_path: Path) -> None:
    breakable = write_images(tmp_path, 26)
    whole = [one.digest for one in walk(resumable(breakable, 4), epochs=1)]
    iterator = CFIterator(built(breakable, 4), seed=9, audit=True)
    loader: Any = iterator._adapter
    file = Path(breakable[int(loader.order(0).ids(13)[0])])
    content = file.read_bytes()
    put(file, b"no picture")
    found: list[str] = []
    with pytest.raises(RuntimeError, match="Critical error") as failure:
        found.extend(map(digest, iterator))
    assert re.search(rf"DALI was reading one of: .*{file.name}", last_line_of(failure.value))
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
