"""DALI's own pipelines, resumed from every state to the pixel, or refused."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import tarfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvidia.dali")

from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.pytorch import (
    DALIClassificationIterator,
    DALIGenericIterator,
    DALIRaggedIterator,
    LastBatchPolicy,
)

from iterators import (
    CFIterator,
    CorruptPositionError,
    IterationStateError,
    NotResumableError,
    Position,
    ResumeMismatchError,
)
from iterators.dali.native import BUILT_ITERATOR, NativeDALILoader
from iterators.testing import FakeManager, check_resumable, digest, walk
from tests.iterators.dali.native_pipelines import (
    OldStyle,
    Spec,
    conditional,
    from_tar,
    iterator_over,
    labels_of,
    plain,
    put,
    settings_of,
    with_source,
    write_images,
)
from tests.iterators.dali.pipelines import last_line_of

ROOT = Path(__file__).resolve().parents[3]
RANDOM = {"random_shuffle": True, "initial_fill": 5}

pytestmark = pytest.mark.dali


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_images(tmp_path_factory.mktemp("images"), 26)


@pytest.fixture
def spec(paths: list[str]) -> Spec:
    return Spec(paths[:10])


def iterator_of(spec: Callable[[bytes | None], Any], **options: Any) -> CFIterator:
    return CFIterator(NativeDALILoader(spec, **options))


def position_after(spec: Spec, batches: int, **options: Any) -> Position:
    iterator = iterator_of(spec, **options)
    for _ in iterator.steps(batches):
        pass
    return Position.from_dict(iterator.state_dict())


def counted(iterator: CFIterator, batch: Any) -> list[int]:
    """The files in a batch that count: pads do not."""
    weights = iterator.last_weights
    assert weights is not None
    return [one for one, weight in zip(labels_of(batch), weights, strict=True) if weight]


class Counting:
    """A factory that notes what it built."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.restored: list[bool] = []
        self.pipelines: list[weakref.ref[Any]] = []

    def __call__(self, checkpoint: bytes | None) -> DALIGenericIterator:
        alive = [one for one in self.pipelines if one() is not None]
        assert not alive, "the pipeline before is still there"
        built = self.spec(checkpoint)
        self.restored.append(checkpoint is not None)
        self.pipelines.append(weakref.ref(built._pipes[0]))
        return built


# From every state, the rest is the same


@pytest.mark.parametrize("reader", [{"shuffle_after_epoch": True}, RANDOM, {}])
@pytest.mark.parametrize(("shard", "shards"), [(0, 1), (1, 3)])
def test_every_state_resumes_exactly(
    paths: list[str], reader: dict[str, Any], shard: int, shards: int
) -> None:
    spec = Spec(paths, shard=shard, shards=shards, reader=reader)
    tried = check_resumable(lambda: iterator_of(spec), epochs=3)
    assert tried == 3 * len(NativeDALILoader(spec)) + 1


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("prepare_first_batch", [True, False])
def test_every_way_to_build_the_iterator_resumes_exactly(
    spec: Spec, auto_reset: bool, prepare_first_batch: bool
) -> None:
    how = {"auto_reset": auto_reset, "prepare_first_batch": prepare_first_batch}
    check_resumable(lambda: iterator_of(spec.but(iterator=how)), epochs=3)


@pytest.mark.parametrize(("n", "batch"), [(1, 1), (1, 4), (3, 4), (8, 4), (9, 4), (5, 1)])
def test_every_size_resumes_exactly(paths: list[str], n: int, batch: int) -> None:
    check_resumable(lambda: iterator_of(Spec(paths[:n], batch=batch)), epochs=3)


@pytest.mark.parametrize(
    "settings", [{"prefetch_queue_depth": 4}, {"exec_dynamic": False}, {"num_threads": 2}]
)
def test_how_a_pipeline_is_run_may_change(spec: Spec, settings: dict[str, Any]) -> None:
    check_resumable(
        lambda: iterator_of(spec),
        make_resumed=lambda: iterator_of(spec.but(settings=settings)),
    )


def test_a_classification_iterator_resumes_exactly(spec: Spec) -> None:
    def make(checkpoint: bytes | None) -> DALIClassificationIterator:
        return DALIClassificationIterator(
            spec.build(checkpoint), reader_name="Reader", last_batch_policy=LastBatchPolicy.PARTIAL
        )

    check_resumable(lambda: iterator_of(make))


def test_an_iterator_of_lists_resumes_exactly(spec: Spec) -> None:
    tags = [DALIRaggedIterator.SPARSE_LIST_TAG, DALIRaggedIterator.DENSE_TAG]

    def make(checkpoint: bytes | None) -> DALIRaggedIterator:
        pipeline = spec.build(checkpoint)
        return iterator_over(pipeline, DALIRaggedIterator, output_types=tags)

    check_resumable(lambda: iterator_of(make))


def test_a_pipeline_of_operator_objects_resumes_exactly(spec: Spec) -> None:
    def make(checkpoint: bytes | None) -> DALIGenericIterator:
        return iterator_over(OldStyle(spec.paths, **settings_of(spec, checkpoint)))

    check_resumable(lambda: iterator_of(make))


def test_a_folder_of_arrays_through_random_branches_resumes_exactly(
    spec: Spec, tmp_path: Path
) -> None:
    for index in range(11):
        np.save(tmp_path / f"{index:02d}.npy", np.full(3, index, dtype=np.int64))

    def make(checkpoint: bytes | None) -> DALIGenericIterator:
        return iterator_over(conditional(str(tmp_path), **settings_of(spec, checkpoint)))

    check_resumable(lambda: iterator_of(make))
    assert NativeDALILoader(make).identity.fingerprint.startswith("readers__Numpy:Files:11:")


def test_a_tar_archive_resumes_exactly(spec: Spec, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "archive.tar", "w") as archive:
        for index in range(11):
            for suffix in "ab":
                entry = tarfile.TarInfo(f"{index:03d}.{suffix}")
                entry.size = 2
                archive.addfile(entry, io.BytesIO(f"{index:02d}".encode()))

    def make(checkpoint: bytes | None) -> DALIGenericIterator:
        path = str(tmp_path / "archive.tar")
        return iterator_over(from_tar(path, **settings_of(spec, checkpoint)))

    check_resumable(lambda: iterator_of(make))


def test_an_external_source_that_is_told_the_index_resumes_exactly(spec: Spec) -> None:
    def source(index: int) -> Any:
        return np.full((4, 1), 100 * index)

    check_resumable(
        lambda: iterator_of(spec.but(pipeline=with_source, settings={"source": source}))
    )


def test_a_pipeline_without_a_seed_is_taken_back_to_where_it_began(spec: Spec) -> None:
    loader = NativeDALILoader(spec.but(settings={"seed": None}))
    iterator = CFIterator(loader, cf_manager=FakeManager())
    look = digest(next(iter(iterator)))
    assert digest(next(iter(iterator))) == look


def test_three_restores_in_one_epoch_serve_every_sample_once(spec: Spec) -> None:
    served: list[int] = []
    state: dict[str, Any] | None = None
    for last in (1, 2, 3, 6):
        iterator = iterator_of(spec)
        if state is not None:
            iterator.load_state_dict(json.loads(json.dumps(state)))
        for batch in iterator.steps(last):
            served += labels_of(batch)
        state = iterator.state_dict()
    assert sorted(served[:10]) == sorted(served[10:]) == list(range(10))


@pytest.mark.parametrize("reader", [{"shuffle_after_epoch": True}, RANDOM])
def test_ranks_killed_at_every_step_serve_every_sample_once(
    paths: list[str], reader: dict[str, Any]
) -> None:
    world = 3
    specs = [Spec(paths, shard=one, shards=world, reader=reader) for one in range(world)]
    served: dict[int, list[int]] = {}
    state: dict[str, Any] | None = None
    for step in range(1, 2 * 3 + 1):
        ranks = [iterator_of(one, rank=r, world=world) for r, one in enumerate(specs)]
        for one in ranks if state else []:
            one.load_state_dict(json.loads(json.dumps(state)))
        epoch = ranks[0].epoch
        for one in ranks:
            for batch in one.steps(step):
                served.setdefault(epoch, []).extend(counted(one, batch))
        state = ranks[0].merged_state([one.state_dict() for one in ranks])
    assert [sorted(one) for one in served.values()] == [list(range(26))] * 2
    assert (state["epoch"], state["position"]) == (2, 0)


# Epochs, passes and the iterators behind them


def test_places_are_samples_of_all_shards(paths: list[str]) -> None:
    loader = NativeDALILoader(Spec(paths, shard=1, shards=3))
    assert len(loader) == 3
    assert [one.end for one in loader.open(epoch=0, start=0)] == [12, 24, 26]
    assert [loader.batches_left(place) for place in (0, 12, 24, 26)] == [3, 2, 1, 0]
    assert (loader.identity.n, loader.identity.algorithm) == (26, "dali-native-1")


def test_batches_are_counted_on_after_a_restore(spec: Spec) -> None:
    iterator = iterator_of(spec)
    iterator.load_state_dict(position_after(spec, 1).to_dict())
    assert [(len(iterator), iterator.batch) for _ in iterator] == [(3, 1), (3, 2)]
    assert iterator.last_ids is None


def test_an_epoch_knows_how_many_samples_it_served(spec: Spec) -> None:
    iterator = iterator_of(spec)
    for _ in iterator.epochs(1):
        for _ in iterator:
            pass
    report = iterator.last_report
    assert report is not None
    assert (report.served, report.not_served, report.exact) == (10, 0, None)


def test_one_iterator_serves_all_epochs(spec: Spec) -> None:
    make = Counting(spec)
    walk(iterator_of(make), epochs=4)
    assert make.restored == [False]


def test_a_restore_builds_once_more_and_lets_the_first_go(spec: Spec) -> None:
    make = Counting(spec)
    iterator = iterator_of(make)
    iterator.load_state_dict(position_after(spec, 2).to_dict())
    walk(iterator, epochs=3)
    assert make.restored == [False, True]


def test_a_look_at_a_batch_is_taken_back(spec: Spec) -> None:
    make = Counting(spec)
    iterator = CFIterator(NativeDALILoader(make), cf_manager=FakeManager())
    look = digest(next(iter(iterator)))
    assert digest(next(iter(iterator))) == look
    assert make.restored == [False, True]


def test_a_pass_that_is_left_in_steps_continues_with_its_iterator(spec: Spec) -> None:
    make = Counting(spec)
    iterator = iterator_of(make)
    served = [labels_of(next(iter(iterator.steps(9)))) for _ in range(3)]
    assert sorted(one for batch in served for one in batch) == list(range(10))
    assert make.restored == [False]


def test_an_epoch_left_early_is_run_to_its_end_unseen(
    spec: Spec, caplog: pytest.LogCaptureFixture
) -> None:
    whole = walk(iterator_of(spec), epochs=2)
    manager = FakeManager()
    iterator = CFIterator(NativeDALILoader(spec), cf_manager=manager)
    for _ in iterator:
        manager.weight_update()
        break
    served = [digest(batch) for batch in iterator]
    assert served == [one.digest for one in whole if one.epoch == 1]
    assert "dropped 2 batches to reach epoch 1" in caplog.text

    resumed = iterator_of(spec)
    resumed.load_state_dict(manager.positions[0]["train"])
    assert (resumed.epoch, resumed.batch) == (1, 0)
    assert [digest(batch) for batch in resumed] == served


def test_epochs_without_a_batch_are_run_unseen(spec: Spec) -> None:
    whole = walk(iterator_of(spec), epochs=2)
    iterator = iterator_of(spec)
    for epoch in iterator.epochs(2):
        served = [digest(batch) for batch in iterator] if epoch else []
    assert served == [one.digest for one in whole if one.epoch == 1]


def test_closing_lets_the_pipeline_go_and_opening_builds_it_again(spec: Spec) -> None:
    make = Counting(spec)
    loader = NativeDALILoader(make)
    first = [digest(one.data) for one in loader.open(epoch=0, start=0)]
    loader.close()
    loader.close()
    assert make.pipelines[0]() is None
    assert [digest(one.data) for one in loader.open(epoch=0, start=0)] == first


def test_a_closed_pass_serves_nothing(spec: Spec) -> None:
    loader = NativeDALILoader(spec)
    before = loader.open(epoch=0, start=0)
    next(before)
    loader.open(epoch=0, start=0)
    assert list(before) == []


def test_an_iterator_that_someone_else_draws_from_is_noticed(spec: Spec) -> None:
    built: list[DALIGenericIterator] = []

    def make(checkpoint: bytes | None) -> DALIGenericIterator:
        built.append(spec(checkpoint))
        return built[-1]

    iterator = iterator_of(make)
    next(built[0])
    with pytest.raises(IterationStateError, match=r"ended epoch 0 after 2 of 3 batches"):
        list(iterator)


# An exception that the user catches


@pytest.fixture
def breakable(tmp_path: Path) -> list[str]:
    """Images of this test alone."""
    return write_images(tmp_path, 26)


@pytest.mark.parametrize("settings", [{}, {"exec_dynamic": False}], ids=str)
@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("broken", [0, 5, 13, 25])
def test_a_caught_exception_loses_and_repeats_nothing(
    breakable: list[str], broken: int, settings: dict[str, Any], auto_reset: bool
) -> None:
    """The file is repaired, and the loop entered again; every position behind it restores."""
    reader = {"shuffle_after_epoch": True, "dont_use_mmap": True}
    spec = Spec(breakable, reader=reader, settings=settings, iterator={"auto_reset": auto_reset})
    whole = walk(iterator_of(spec), epochs=2)
    iterator = iterator_of(spec.but(iterator={**spec.iterator, "prepare_first_batch": False}))
    file = Path(breakable[broken])
    content = file.read_bytes()
    put(file, b"no picture")
    served, states = [], []

    def serve() -> None:
        for batch in iterator:
            served.append(digest(batch))
            states.append(iterator.state_dict())

    for epoch in iterator.epochs(2):
        if epoch:
            serve()
            continue
        with pytest.raises(RuntimeError, match="Critical error"):
            serve()
        put(file, content)
        serve()
    assert served == [one.digest for one in whole]
    for behind, state in enumerate(states):
        resumed = iterator_of(spec)
        resumed.load_state_dict(state)
        assert digest(next(iter(resumed))) == whole[behind].digest


def test_an_iterator_that_raised_serves_nothing_more(spec: Spec) -> None:
    loader = NativeDALILoader(spec)
    opened = loader.open(epoch=0, start=0)
    first = labels_of(next(opened).data)

    def fails() -> Any:
        raise OSError("no space")

    opened._live._iterator.checkpoints = fails  # type: ignore[union-attr]
    with pytest.raises(OSError, match="no space"):
        next(opened)
    with pytest.raises(IterationStateError, match="start a new loop"):
        next(opened)
    again = [labels_of(one.data) for one in loader.open(epoch=0, start=0)]
    assert again[0] == first
    assert sorted(one for batch in again for one in batch) == list(range(10))


# A shard without a sample in the last batch


@pytest.fixture
def four(paths: list[str]) -> list[Spec]:
    """Shards of 6, 7, 6 and 7 samples in batches of 6."""
    return [Spec(paths, batch=6, shard=one, shards=4) for one in range(4)]


def test_an_empty_last_batch_is_one_pad_of_weight_0(four: list[Spec]) -> None:
    served, sizes = [], []
    for spec in four:
        iterator = iterator_of(spec.but(reader={}))
        for batch in iterator:
            weights = iterator.last_weights
            assert weights is not None
            assert batch[0]["data"].shape == (len(weights), 6, 6, 3)
            served += counted(iterator, batch)
        sizes.append((labels_of(batch), weights.tolist()))
    assert sizes == [([5], [0.0]), ([12], [1.0]), ([18], [0.0]), ([25], [1.0])]
    assert sorted(served) == list(range(26))


@pytest.mark.parametrize("settings", [{}, {"exec_dynamic": False}])
@pytest.mark.parametrize("reader", [{"shuffle_after_epoch": True}, RANDOM])
def test_pads_resume_exactly(
    four: list[Spec], settings: dict[str, Any], reader: dict[str, Any]
) -> None:
    spec = four[0].but(settings=settings, reader=reader)
    check_resumable(lambda: iterator_of(spec), epochs=3)


def test_a_pad_is_not_memory_of_dali(four: list[Spec]) -> None:
    loader = NativeDALILoader(four[0])
    *_, last = loader.open(epoch=0, start=0)
    image = last.data[0]["data"]
    assert image.untyped_storage().nbytes() == image.nbytes


def test_an_empty_batch_of_lists_is_refused(four: list[Spec]) -> None:
    def make(checkpoint: bytes | None) -> DALIRaggedIterator:
        return iterator_over(four[0].build(checkpoint), DALIRaggedIterator)

    with pytest.raises(NotResumableError, match=r"26 samples on 4 shards in batches of 6"):
        NativeDALILoader(make)


# What is refused at once


@pipeline_def
def two_readers(reader: dict[str, Any]) -> Any:
    return (
        fn.readers.file(name="Reader", **reader)[1],
        fn.readers.file(name="Other", **reader)[1],
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"iterator": {"last_batch_policy": LastBatchPolicy.FILL}}, "last_batch_policy is FILL"),
        ({"iterator": {"last_batch_policy": LastBatchPolicy.DROP}}, "last_batch_policy is DROP"),
        ({"reader": {"pad_last_batch": False}}, "give it pad_last_batch=True"),
        ({"settings": {"enable_checkpointing": False}}, "enable_checkpointing=True"),
        ({"pipeline": two_readers}, "found 2 \\(Other, Reader\\)"),
        ({"iterator": {"reader_name": None}}, "give it reader_name='Reader'"),
    ],
)
def test_what_cannot_be_exact_is_refused(spec: Spec, changes: Any, reason: str) -> None:
    with pytest.raises(NotResumableError, match=reason):
        NativeDALILoader(spec.but(**changes))


def _generator() -> Iterator[Any]:
    while True:
        yield np.zeros((4, 1), dtype=np.int64)


@pytest.mark.filterwarnings("ignore:Checkpointing enabled in a pipeline with external source")
@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (_generator, "generator_func"),
        ([np.zeros((4, 1), dtype=np.int64)], "iterable"),
        (lambda: np.zeros((4, 1), dtype=np.int64), "callable"),
    ],
)
def test_a_source_that_restarts_is_refused(spec: Spec, source: Any, kind: str) -> None:
    settings = {"source": source}
    with pytest.raises(NotResumableError, match=rf"takes its data from {kind}"):
        NativeDALILoader(spec.but(pipeline=with_source, settings=settings))


def test_fed_input_is_refused(spec: Spec) -> None:
    lazy = spec.but(pipeline=with_source, iterator={"prepare_first_batch": False})
    with pytest.raises(NotResumableError, match="takes its data from feed_input"):
        NativeDALILoader(lazy)


def test_several_pipelines_are_refused(spec: Spec) -> None:
    def make(checkpoint: bytes | None) -> DALIGenericIterator:
        pipelines = [spec.but(shard=one, shards=2).build(checkpoint) for one in range(2)]
        return DALIGenericIterator(pipelines, ["data", "label"], reader_name="Reader")

    with pytest.raises(NotResumableError, match="runs 2 pipelines"):
        NativeDALILoader(make)


def test_a_built_iterator_is_refused(spec: Spec) -> None:
    with pytest.raises(NotResumableError, match="DALIGenericIterator is already built") as caught:
        NativeDALILoader(spec(None))  # type: ignore[arg-type]
    assert BUILT_ITERATOR in str(caught.value)


def test_something_else_than_an_iterator_is_refused() -> None:
    with pytest.raises(NotResumableError, match="got list"):
        NativeDALILoader(lambda checkpoint: [])


def test_a_factory_that_ignores_the_checkpoint_is_refused(spec: Spec) -> None:
    iterator = iterator_of(lambda checkpoint: spec(None))
    iterator.load_state_dict(position_after(spec, 2).to_dict())
    with pytest.raises(NotResumableError, match="starts from the beginning"):
        next(iter(iterator))


def test_a_pipeline_that_was_run_before_is_refused(spec: Spec) -> None:
    def make(checkpoint: bytes | None) -> DALIGenericIterator:
        return iterator_over(spec(checkpoint)._pipes[0])

    with pytest.raises(NotResumableError, match="has served 1 batches, not 0"):
        NativeDALILoader(make)


def test_a_factory_that_restores_a_different_checkpoint_is_refused(spec: Spec) -> None:
    built = spec(None)
    next(built)
    other = built.checkpoints()[0]
    iterator = iterator_of(lambda one: spec(one and other))
    iterator.load_state_dict(position_after(spec, 2).to_dict())
    with pytest.raises(NotResumableError, match="has served 1 batches, not 2"):
        next(iter(iterator))


def test_a_factory_that_builds_a_different_iterator_is_refused(spec: Spec) -> None:
    iterator = iterator_of(lambda one: spec(one) if one is None else spec.but(batch=2)(one))
    iterator.load_state_dict(position_after(spec, 2).to_dict())
    with pytest.raises(NotResumableError, match="the same iterator each time"):
        next(iter(iterator))


@pytest.mark.parametrize(("rank", "world"), [(1, None), (None, 2), (2, 2), (-1, 2)])
def test_half_a_rank_is_refused(spec: Spec, rank: int | None, world: int | None) -> None:
    with pytest.raises(ValueError, match="rank"):
        NativeDALILoader(spec, rank=rank, world=world)


def test_surprising_settings_are_logged(spec: Spec, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    NativeDALILoader(spec.but(settings={"seed": None}), rank=1, world=2)
    assert "every run has the same order" in caplog.text
    assert "has no seed" in caplog.text
    assert "each of them reads all samples" in caplog.text


def test_python_functions_are_warned_of(spec: Spec, caplog: pytest.LogCaptureFixture) -> None:
    @pipeline_def
    def calling(reader: dict[str, Any]) -> Any:
        encoded, labels = fn.readers.file(name="Reader", **reader)
        return encoded, fn.python_function(labels, function=lambda one: one)

    flat = spec.but(pipeline=calling, iterator={"prepare_first_batch": False})
    NativeDALILoader(flat)
    assert "any state that it keeps is not saved" in caplog.text


# What is refused on a restore


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"shard": 1}, "shard"),
        ({"shards": 3}, "shards"),
        ({"batch": 5}, "batch"),
        ({"pipeline": plain}, "operators"),
        ({"reader": RANDOM}, "settings"),
        ({"reader": {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": 3}}, "settings"),
    ],
)
def test_a_different_layout_or_pipeline_is_refused(spec: Spec, changes: Any, field: str) -> None:
    saved = position_after(spec.but(shards=2), 1)
    live = iterator_of(spec.but(**{"shards": 2, **changes}))
    with pytest.raises(ResumeMismatchError) as caught:
        live.load_state_dict(saved.to_dict())
    assert caught.value.field == field
    assert live.state_dict()["position"] == 0


def test_a_different_world_is_refused(spec: Spec) -> None:
    saved = position_after(spec, 1)
    loader = NativeDALILoader(spec, rank=1, world=2)
    with pytest.raises(ResumeMismatchError, match=r"world is 2, but .* saved with 1"):
        CFIterator(loader).load_state_dict(saved.to_dict())


def test_a_different_version_of_dali_is_warned_about(
    spec: Spec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved = position_after(spec, 1)
    monkeypatch.setattr("iterators.dali.native.__version__", "9.9")
    NativeDALILoader(spec).accept(saved)
    assert re.search(r"written by DALI 2\S+, this is DALI 9.9", caplog.text)


def test_an_error_of_dali_while_it_restores_has_a_note_that_says_so(spec: Spec) -> None:
    iterator = iterator_of(lambda one: (spec if one is None else spec.but(pipeline=plain))(one))
    iterator.load_state_dict(position_after(spec, 1).to_dict())
    with pytest.raises(RuntimeError) as caught:
        next(iter(iterator))
    assert last_line_of(caught.value) == "while building the pipeline from a DALI checkpoint"


def test_states_in_a_different_order_of_ranks_are_refused(spec: Spec) -> None:
    ranks = [
        position_after(spec.but(shard=one, shards=2), 1, rank=one, world=2) for one in range(2)
    ]
    swapped = replace(ranks[0], states=ranks[1].states + ranks[0].states, ranks=())
    loader = NativeDALILoader(spec.but(shards=2), rank=0, world=2)
    with pytest.raises(ResumeMismatchError, match="rank is 0, but .* saved with 1"):
        CFIterator(loader).load_state_dict(swapped.to_dict())


def test_other_files_are_refused(paths: list[str]) -> None:
    saved = position_after(Spec(paths[:10]), 1)
    live = iterator_of(Spec(paths[1:11]))
    with pytest.raises(ResumeMismatchError, match="fingerprint"):
        live.load_state_dict(saved.to_dict())


def test_a_fingerprint_given_stands_for_the_files(paths: list[str]) -> None:
    saved = position_after(Spec(paths[:10]), 1, fingerprint="mine")
    live = iterator_of(Spec(paths[1:11]), fingerprint="mine")
    live.load_state_dict(saved.to_dict())
    assert live.batch == 1


def test_the_fingerprint_follows_the_files_and_not_their_root(tmp_path: Path) -> None:
    def name(reader: dict[str, Any]) -> str:
        spec = Spec([], reader={"files": None, "labels": None, **reader})
        return NativeDALILoader(spec).identity.fingerprint

    paths = write_images(tmp_path / "one", 6)
    write_images(tmp_path / "two", 6)
    roots = [{"file_root": str(tmp_path / one)} for one in ("one", "two")]
    assert name(roots[0]) == name(roots[1])
    (tmp_path / "one" / "class0" / "notes.txt").write_text("not an image")
    assert name(roots[0]) == name(roots[1])
    os.rename(paths[0], tmp_path / "one" / "class0" / "other.jpg")
    assert name(roots[0]) != name(roots[1])

    lists = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, label in zip(lists, (1, 2), strict=True):
        path.write_text(f"class1/001.jpg {label}\n")
    listed = [name({**roots[1], "file_list": str(one)}) for one in lists]
    assert listed[0] != listed[1]


def test_a_moved_list_of_files_is_the_same_data(tmp_path: Path) -> None:
    specs = [Spec(write_images(tmp_path / one, 6)) for one in ("one", "another")]
    names = {NativeDALILoader(one).identity.fingerprint for one in specs}
    assert len(names) == 1


def test_no_bit_of_a_state_can_flip_unnoticed(spec: Spec) -> None:
    loader, saved = NativeDALILoader(spec), position_after(spec, 2)
    text = json.dumps(saved.states[0]).encode()
    read = 0
    for index in range(len(text)):
        for bit in (1 << index % 8, 1):
            flipped = bytearray(text)
            flipped[index] ^= bit
            try:
                state = json.loads(flipped)
            except ValueError:
                continue
            read += 1
            with pytest.raises(CorruptPositionError):
                loader.accept(replace(saved, states=(state,)))
    assert read > len(text) / 2
    loader.accept(saved)


def test_no_part_of_a_state_can_be_missing(spec: Spec) -> None:
    loader, saved = NativeDALILoader(spec), position_after(spec, 2)
    state = saved.states[0]
    blob = state["checkpoint"]
    damaged = [{**state, "checkpoint": blob[:end]} for end in range(len(blob))]
    damaged += [{key: state[key] for key in state if key != name} for name in state]
    for one in [*damaged, None, [], {}, {**state, "more": 1}]:
        with pytest.raises(CorruptPositionError):
            loader.accept(replace(saved, states=(one,)))


def test_a_state_of_a_newer_format_asks_for_an_upgrade(spec: Spec) -> None:
    loader, saved = NativeDALILoader(spec), position_after(spec, 2)
    newer = {**saved.states[0], "version": 2}
    with pytest.raises(CorruptPositionError, match="upgrade"):
        loader.accept(replace(saved, states=(newer,)))


def test_a_place_without_the_state_that_belongs_to_it_is_refused(spec: Spec) -> None:
    loader, saved = NativeDALILoader(spec), position_after(spec, 2)
    with pytest.raises(CorruptPositionError, match="lacks the states"):
        loader.accept(replace(saved, states=()))
    with pytest.raises(
        CorruptPositionError, match="at sample 4 of epoch 0, but DALI's state in it is"
    ):
        loader.accept(replace(saved, position=4))


# A process that is killed


KILLED = """
import json, os, signal, sys
from pathlib import Path
from iterators import CFIterator
from iterators.dali import NativeDALILoader
from iterators.testing import digest
from tests.iterators.dali.native_pipelines import Spec

path, kill_at = sys.argv[1], int(sys.argv[2])
class Manager:
    update_attempts, stopped = 0, False
    def register_position(self, name, source): self.source = source
    def before_first_batch(self): pass
    def step(self):
        saved["position"] = self.source.state_dict()
        with open(path + ".new", "w") as file: json.dump(saved, file)
        os.replace(path + ".new", path)
    end_epoch = step

saved = json.load(open(path)) if os.path.exists(path) else {"history": []}
manager = Manager()
spec = Spec(sorted(sys.argv[3:]), shard=1, shards=2, settings={"num_threads": 2})
iterator = CFIterator(NativeDALILoader(spec), cf_manager=manager)
if "position" in saved:
    iterator.load_state_dict(saved["position"])
served = 0
for _ in iterator.epochs(3):
    for batch in iterator:
        served += 1
        if served == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        saved["history"].append(digest(batch))
        manager.update_attempts += 1
"""


@pytest.mark.crash
def test_a_process_killed_several_times_serves_the_same_pixels(
    paths: list[str], tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    for kill_at in (1, 4, 0):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(saved), str(kill_at), *paths],
            check=False,
            cwd=ROOT,
            timeout=400,
        )
        assert done.returncode == (-9 if kill_at else 0)
    state = json.loads(saved.read_text())
    whole = walk(iterator_of(Spec(sorted(paths), shard=1, shards=2)), epochs=3)
    assert state["history"] == [one.digest for one in whole]
    assert (state["position"]["epoch"], state["position"]["position"]) == (3, 0)
