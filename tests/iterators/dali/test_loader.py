"""The DALI adapter: what it takes over, what it throws away, what it checks, what it refuses."""

from __future__ import annotations

import gc
import multiprocessing
import sys
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
from iterators.dali.source import BatchStart
from iterators.testing import FakeManager, check_resumable, digest, walk
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


def test_what_was_prefetched_where_training_begins_is_used(paths: list[str]) -> None:
    iterator = counting(paths[:12], 3, seed=1, resume_epoch=2, resume_index=3)
    served(DALILoader(iterator), epoch=2, start=3)
    assert iterator.asked == 3


def test_the_next_epoch_is_prefetched_while_the_last_batch_is_used(paths: list[str]) -> None:
    iterator = counting(paths[:10], 3, seed=0)
    loader = DALILoader(iterator)
    for epoch in range(3):
        other = DALILoader(built(paths[:10], 3, seed=0))
        assert served(loader, epoch=epoch) == served(other, epoch=epoch)
        assert sole_source(iterator._pipes[0]).front == (0, epoch + 1, 0)
        assert sole_source(iterator._pipes[0]).num_produced > 0
    assert iterator.asked == 3 * 4


def test_a_pause_throws_nothing_away(paths: list[str]) -> None:
    iterator = counting(paths[:12], 3)
    loader = DALILoader(iterator)
    parts = [served(loader, epoch=0, start=start, at_most=1) for start in (0, 3, 6, 9)]
    assert iterator.asked == 4
    assert list(chain.from_iterable(parts)) == served(DALILoader(built(paths[:12], 3)), epoch=0)


def test_a_different_place_costs_no_more_than_the_prefetched_batches(paths: list[str]) -> None:
    iterator = counting(paths[:40], 2)
    served(DALILoader(iterator), epoch=0, start=30)
    assert iterator.asked == 5 + 3


def test_an_iterator_that_prepares_nothing_starts_with_the_first_batch(paths: list[str]) -> None:
    pipe = augmented(reader(paths[:12]), 3)
    loader = DALILoader(DALIGenericIterator(pipe, KEYS, prepare_first_batch=False))
    opened = loader.open(epoch=0, start=3)
    assert sole_source(pipe).num_produced == 0
    next(opened)
    assert sole_source(pipe).num_produced == 2


def test_nothing_is_asked_of_dali_where_an_epoch_has_nothing_left(paths: list[str]) -> None:
    iterator = counting(paths[:12], 3)
    assert list(DALILoader(iterator).open(epoch=0, start=12)) == []
    assert iterator.asked == 0


@pytest.mark.parametrize("taken", [1, 2, 4])
def test_batches_that_someone_else_took_are_served_again(paths: list[str], taken: int) -> None:
    iterator = built(paths[:10], 3)
    for _ in range(taken):
        next(iterator)
    assert served(DALILoader(iterator), epoch=0) == served(
        DALILoader(built(paths[:10], 3)), epoch=0
    )


def test_an_iterator_that_was_used_up_is_entered_again(paths: list[str]) -> None:
    iterator = built(paths[:10], 3)
    assert len(list(iterator)) == 4
    loader = DALILoader(iterator)
    for epoch in (1, 0):
        expected = served(DALILoader(built(paths[:10], 3)), epoch=epoch)
        assert served(loader, epoch=epoch) == expected


def test_an_epoch_that_a_different_one_replaced_hands_out_nothing(paths: list[str]) -> None:
    loader = DALILoader(built(paths[:10], 3))
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


def test_two_interleaved_loops_over_one_iterator_are_noticed(paths: list[str]) -> None:
    iterator = built(paths[:10], 3)
    first, later = CFIterator(iterator, seed=9), CFIterator(iterator, seed=9)
    loop = iter(later)
    next(loop)
    with pytest.raises(IterationStateError, match="a second DALILoader or CFIterator"):
        next(iter(first))
    assert len(list(loop)) == 3


@pytest.mark.parametrize("pipeline", [{}, {"exec_dynamic": False}], ids=str)
@pytest.mark.parametrize("taken", [1, 2, 3])
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


def test_a_batch_from_a_different_place_is_noticed(paths: list[str]) -> None:
    iterator = built(paths[:40], 3)
    opened = DALILoader(iterator).open(epoch=0, start=0)
    next(opened)
    sole_source(iterator._pipes[0]).seek(BatchStart(0, 5, 6))
    with pytest.raises(IterationStateError, match=r"made the batch at BatchStart\(.*epoch=5"):
        list(opened)


@pytest.mark.filterwarnings("ignore:Please set `reader_name`")
def test_an_iterator_that_was_refused_is_left_as_it_was(paths: list[str]) -> None:
    iterator = built(paths[:10], 3, seed=7)
    with pytest.raises(ValueError, match="seed is 3 here"):
        DALILoader(iterator, seed=3)
    assert len(list(iterator)) == 4
    sized = built(paths[:10], 5, iterator={"size": 10})
    with pytest.raises(NotResumableError, match="size=10"):
        DALILoader(sized)
    assert not sole_source(sized._pipes[0]).endless


@pytest.mark.parametrize("batches", [0, 2, 4])
def test_a_pipeline_is_let_go_with_its_iterator(paths: list[str], batches: int) -> None:
    iterator = resumable(paths[:10], 3)
    loader: Any = iterator._adapter
    pipeline = weakref.ref(loader._pipeline)
    gc.collect()
    gc.disable()
    try:
        for _ in iterator:
            if batches == iterator.batch + 1:
                break
        opened = loader.open(epoch=3, start=0)
        next(opened)
        opened.close()
        del iterator, loader, opened
        assert pipeline() is None
    finally:
        gc.enable()


# Under CFIterator


def test_a_look_at_one_batch_is_taken_back(paths: list[str]) -> None:
    manager = FakeManager()
    iterator = CFIterator(built(paths[:10], 3), seed=9, cf_manager=manager)
    looked = digest(next(iter(iterator)))
    (whole, *_) = walk(resumable(paths[:10], 3), epochs=1)
    assert looked == whole.digest
    found = []
    for data in iterator:
        manager.weight_update()
        found.append(digest(data))
    assert found == [one.digest for one in walk(resumable(paths[:10], 3), epochs=1)]


def test_a_position_is_restored_after_a_look(paths: list[str]) -> None:
    whole = walk(resumable(paths[:10], 3), epochs=2)
    state = resumable(paths[:10], 3)
    for _ in state.steps(5):
        pass
    iterator = CFIterator(built(paths[:10], 3), seed=9, cf_manager=FakeManager())
    for _ in iterator:
        break
    iterator.load_state_dict(state.state_dict())
    assert [digest(data) for data in iterator] == [one.digest for one in whole[5:]]


def test_an_epoch_left_early_is_over(paths: list[str]) -> None:
    iterator, found = resumable(paths[:10], 3), []
    for _ in iterator.epochs(3):
        for data in iterator:
            found.append(digest(data))
            if iterator.batch == iterator.epoch:
                break
    whole = walk(resumable(paths[:10], 3), epochs=3)
    assert found == [one.digest for one in whole if one.batch <= one.epoch]


def test_an_audited_epoch_is_exact_and_names_files(paths: list[str], images: Path) -> None:
    loader = DALILoader(built(paths[:10], 3, file_root=images))
    iterator = CFIterator(loader, audit=True)
    for _ in iterator.epochs(1):
        for _ in iterator:
            pass
    report = iterator.last_report
    assert report is not None
    assert (report.exact, report.faults) == (True, ())
    assert [loader.name_of(one) for one in (0, 9)] == [
        str(Path(paths[one]).relative_to(images)) for one in (0, 9)
    ]


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


def test_the_seed_may_come_from_either_side(paths: list[str]) -> None:
    expected = walk(CFIterator(built(paths[:10], 4), seed=7), epochs=1)
    assert walk(CFIterator(built(paths[:10], 4, seed=7)), epochs=1) == expected
    assert walk(CFIterator(built(paths[:10], 4, seed=7), seed=7), epochs=1) == expected
    with pytest.raises(ValueError, match="seed is 3 here and 7 in the FileReader"):
        CFIterator(built(paths[:10], 4, seed=7), seed=3)


def test_other_files_are_refused(paths: list[str]) -> None:
    state = resumable(paths[:10], 4).state_dict()
    with pytest.raises(ResumeMismatchError, match="fingerprint"):
        resumable(paths[1:11], 4).load_state_dict(state)
    resumable(paths[:10], 2, fingerprint="same")
    with pytest.raises(ResumeMismatchError, match="algorithm"):
        resumable(paths[:10], 4, shuffle=False).load_state_dict(state)


def test_the_layout_says_how_the_data_is_spread(paths: list[str]) -> None:
    loader = DALILoader(built(paths[:10], 4, shard_id=1, num_shards=2))
    assert (loader.rank, loader.layout.world, loader.layout.batch) == (1, 2, 4)
    assert {"dali", "torch", "numpy"} == set(loader.layout.to_dict()["versions"])
    assert (len(loader), loader.batches_left(8)) == (2, 1)


# Tails


@pytest.mark.parametrize(("n", "world", "batch"), [(26, 4, 6), (1, 4, 3), (9, 2, 4), (5, 3, 2)])
def test_no_rank_gets_an_empty_batch(paths: list[str], n: int, world: int, batch: int) -> None:
    counted: list[int] = []
    for rank in range(world):
        loader = DALILoader(built(paths[:n], batch, shard_id=rank, num_shards=world))
        for delivery in loader.open(epoch=0, start=0):
            (parts,) = delivery.data
            assert delivery.ids is not None
            assert delivery.weights is not None
            assert {len(one) for one in parts.values()} == {len(delivery.ids)}
            assert len(delivery.ids) >= 1
            assert parts["weight"].flatten().tolist() == delivery.weights.tolist()
            counted += delivery.ids[delivery.weights > 0].tolist()
    assert sorted(counted) == list(range(n))


def test_an_idle_rank_gets_one_flagged_pad(paths: list[str]) -> None:
    loader = DALILoader(built(paths[:9], 4, shuffle=False, shard_id=1, num_shards=2))
    tail = list(loader.open(epoch=0, start=0))[-1]
    assert tail.data[0]["id"].tolist() == [[8]]
    assert tail.data[0]["weight"].tolist() == [[0.0]]


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
    for shard in range(2):
        whole = CFIterator(DALIClassificationIterator(TrainPipe(3, images, shard=shard, shards=2)))
        expected = [one.digest for one in walk(whole, epochs=2)]
        for batches in (0, 1, 5, 6):
            pipe = TrainPipe(
                *(3, images),
                shard=shard,
                shards=2,
                resume_index=batches * 3,
                resume_epoch=1,
                cf_det=True,
            )
            resumed = CFIterator(DALIClassificationIterator(pipe))
            assert resumed.epoch == 1
            assert [digest(data) for data in resumed] == expected[7 + batches :]
            assert resumed.last_ids is not None
            list(resumed)
            assert resumed.last_report is not None
            assert resumed.last_report.exact


def test_a_resumed_script_serves_the_epochs_after_it(images: Path) -> None:
    pipe = TrainPipe(16, images, resume_index=32, resume_epoch=1)
    resumed = walk(CFIterator(DALIClassificationIterator(pipe)), epochs=3)
    whole = walk(CFIterator(DALIClassificationIterator(TrainPipe(16, images))), epochs=3)
    assert [(one.epoch, one.batch) for one in resumed] == [(1, 2), (2, 0), (2, 1), (2, 2)]
    assert [one.digest for one in resumed] == [one.digest for one in whole[5:]]


def test_a_reader_with_resume_index_past_its_last_sample_starts_with_the_next_epoch(
    images: Path,
) -> None:
    pipe = TrainPipe(16, images, resume_index=1000, resume_epoch=1)
    resumed = CFIterator(DALIClassificationIterator(pipe))
    assert list(resumed) == []
    whole = walk(CFIterator(DALIClassificationIterator(TrainPipe(16, images))), epochs=3)
    assert [digest(data) for data in resumed] == [one.digest for one in whole[6:]]


def test_the_originals_shape_resumes_from_every_state(images: Path) -> None:
    check_resumable(lambda: CFIterator(DALIClassificationIterator(TrainPipe(16, images))))


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


@pytest.mark.parametrize("key", ["id", "label", "weight"])
def test_a_batch_of_other_samples_is_noticed(paths: list[str], key: str) -> None:
    iterator = Tampering(augmented(reader(paths[:10]), 4), KEYS)
    iterator.change = lambda batch: {**batch, key: batch[key] + 1}
    with pytest.raises(RuntimeError, match=f"delivered a different {key} in '{key}'"):
        list(DALILoader(iterator).open(epoch=0, start=0))


def test_a_batch_that_lost_a_sample_is_noticed(paths: list[str]) -> None:
    iterator = Tampering(augmented(reader(paths[:10]), 4), KEYS)
    iterator.change = lambda batch: {key: one[:-1] for key, one in batch.items()}
    with pytest.raises(RuntimeError, match="delivered 3 samples in 'data' where the reader prod"):
        list(DALILoader(iterator).open(epoch=0, start=0))


@pytest.mark.parametrize("settings", [{}, {"exec_dynamic": False}, {"prefetch_queue_depth": 4}])
def test_a_file_that_cannot_be_read_is_among_those_named(
    paths: list[str], tmp_path: Path, settings: dict[str, Any]
) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    files = [*paths[:12], "broken.jpg"]
    loader = DALILoader(built(files, 1, file_root=tmp_path, seed=1, pipeline=settings))
    with pytest.raises(RuntimeError, match="Critical error") as failure:
        list(loader.open(epoch=0, start=0))
    note = last_line_of(failure.value)
    assert "broken.jpg" in note
    if settings == {"exec_dynamic": False}:
        assert note.endswith("(with exec_dynamic=False, build the pipeline again)")
    else:
        assert note == "DALI was reading one of: broken.jpg"


@pytest.fixture
def breakable(tmp_path: Path) -> list[str]:
    """Images of this test alone."""
    return write_images(tmp_path, 26)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prepare", [True, False])
@pytest.mark.parametrize("broken", [[5], [9], [5, 10], [5, 10, 15]], ids=str)
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


def test_the_older_executor_is_reported_once_as_unable_to_continue(breakable: list[str]) -> None:
    put(breakable[1], b"no picture")
    iterator = built(
        *(breakable, 4),
        shuffle=False,
        pipeline={"exec_dynamic": False},
        iterator={"prepare_first_batch": False},
    )
    iterator._schedule_runs(False)
    loader = DALILoader(iterator)
    with pytest.raises(RuntimeError, match="Critical error") as failure:
        loader.open(epoch=0, start=16)
    note = last_line_of(failure.value)
    assert "not needed" in note
    assert "build it again" in note
    assert ".jpg" not in note
    for _ in range(2):
        with pytest.raises(IterationStateError, match="has stopped at an earlier error") as again:
            loader.open(epoch=0, start=16)
        assert "not needed" not in last_line_of(again.value)


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


def refused(pipelines: Any, **settings: Any) -> str:
    keys = ["data", "label"]
    with pytest.raises(NotResumableError) as refusal:
        CFIterator(DALIGenericIterator(pipelines, keys, **settings))
    return str(refusal.value)


@pytest.mark.filterwarnings("ignore:Please set `reader_name`")
def test_several_pipelines_are_refused(images: Path) -> None:
    pipes = [TrainPipe(4, images, shard=shard, shards=2) for shard in range(2)]
    reason = refused(pipes, size=40)
    assert "runs 2 pipelines" in reason


@pytest.mark.filterwarnings("ignore:Please set `reader_name`")
def test_a_size_is_refused(images: Path) -> None:
    assert "leave size and reader_name out" in refused(TrainPipe(4, images), size=40)


def test_dalis_own_reader_is_refused(images: Path) -> None:
    def define() -> Any:
        encoded, label = fn.readers.file(file_root=str(images), name="Reader")
        return pictures(encoded), label

    reason = refused(defined(define), reader_name="Reader")
    assert "reads with fn.readers.file" in reason
    assert "Use iterators.dali.FileReader in its place" in reason
    assert "NativeDALILoader(make)" in reason


def test_a_pipeline_without_a_reader_is_refused() -> None:
    def define() -> Any:
        data = types.Constant(np.zeros(3, dtype=np.float32), device="cpu")
        return data, data + 1

    assert "has no reader of ours" in refused(defined(define))


@pytest.mark.filterwarnings("ignore:The external source node")
def test_two_readers_are_refused(paths: list[str]) -> None:
    def define() -> Any:
        (one, _), (other, _) = FileReader(files=paths)(), FileReader(files=paths)()
        return pictures(one), pictures(other)

    assert "has 2 FileReaders" in refused(defined(define))


def test_a_different_source_beside_the_reader_is_refused(paths: list[str]) -> None:
    def define() -> Any:
        encoded, label = FileReader(files=paths)()
        extra = fn.external_source(lambda: np.zeros((4, 1), dtype=np.int32), batch=True)
        return pictures(encoded), label + extra

    assert "also fed by fn.external_source" in refused(defined(define))


RANDOM: dict[str, Callable[[Any], Any]] = {
    "fn.random.coin_flip": lambda data: fn.flip(data, horizontal=fn.random.coin_flip()),
    "fn.random.uniform": lambda data: data + fn.random.uniform(),
    "fn.random_resized_crop": lambda data: fn.random_resized_crop(data, size=[4, 4]),
    "fn.noise.gaussian": lambda data: fn.noise.gaussian(data, stddev=2.0),
    "fn.batch_permutation": lambda data: fn.permute_batch(data, indices=fn.batch_permutation()),
}


@pytest.mark.parametrize("name", RANDOM)
def test_dalis_own_random_numbers_are_refused(paths: list[str], name: str) -> None:
    def define() -> Any:
        encoded, label = FileReader(files=paths)()
        return RANDOM[name](pictures(encoded)), label

    reason = refused(defined(define))
    assert f"({name})" in reason
    assert "num_uniforms" in reason


PYTHON: dict[str, Callable[[Any], Any]] = {
    "python_function": lambda data: fn.python_function(data, function=lambda one: one),
    "by batch": lambda data: fn.python_function(
        data, function=lambda batch: batch, batch_processing=True
    ),
    "dl_tensor_python_function": lambda data: fn.dl_tensor_python_function(
        data, function=lambda one: one
    ),
}


@pytest.mark.parametrize("name", PYTHON)
def test_python_code_is_refused_as_it_may_draw(paths: list[str], name: str) -> None:
    def define(native_random: bool = False) -> Any:
        encoded, label = FileReader(files=paths[:4], native_random=native_random)()
        return pictures(encoded), PYTHON[name](label)

    reason = refused(defined(define))
    assert "runs Python code (fn.python_function), whose random numbers" in reason
    pipe = defined(lambda: define(native_random=True))
    accepted = CFIterator(DALIGenericIterator(pipe, ["data", "label"]))
    assert sorted(next(iter(accepted))[0]["label"].flatten().tolist()) == [0, 1, 2, 3]


def test_a_random_crop_while_decoding_is_refused(paths: list[str]) -> None:
    def define() -> Any:
        encoded, label = FileReader(files=paths)()
        cropped = fn.decoders.image_random_crop(encoded)
        return fn.resize(cropped, size=[6, 6]), label

    assert "(fn.decoders.image_random_crop)" in refused(defined(define))


def test_random_numbers_of_dali_may_be_accepted_for_an_exact_order(paths: list[str]) -> None:
    def define() -> Any:
        encoded, ids = FileReader(files=paths[:10], outputs=("id",), native_random=True)()
        return fn.flip(pictures(encoded), horizontal=fn.random.coin_flip()), ids

    def make() -> CFIterator:
        return CFIterator(DALIGenericIterator(defined(define), ["data", "id"]))

    iterator = make()
    for _ in iterator.steps(2):
        pass
    resumed = make()
    resumed.load_state_dict(iterator.state_dict())
    assert [data[0]["id"].flatten().tolist() for data in resumed] == [
        data[0]["id"].flatten().tolist() for data in iterator
    ]


def test_a_different_iterator_of_dali_is_refused() -> None:
    assert "nvidia.dali.plugin.pytorch" in sys.modules
    with pytest.raises(NotResumableError, match=r"a DALI iterator over iterators\.dali\.FileR"):
        CFIterator([1])


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
