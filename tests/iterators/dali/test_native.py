"""DALI's own pipelines, resumed from every state to the pixel, or refused."""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Callable
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
    NotResumableError,
    Position,
    ResumeMismatchError,
)
from iterators.dali.native import BUILT_ITERATOR, NativeDALILoader
from iterators.testing import FakeManager, check_resumable, digest, walk
from tests.iterators.dali.native_pipelines import (
    Spec,
    iterator_over,
    labels_of,
    plain,
    put,
    with_source,
    write_images,
)

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


EXACT: dict[str, Callable[[Spec], Spec]] = {
    "shuffled after each epoch": lambda spec: spec,
    "padded": lambda spec: spec.but(shard=2, shards=4, batch=3, settings={"exec_dynamic": False}),
    "in order, batches of one": lambda spec: spec.but(paths=spec.paths[:5], batch=1, reader={}),
    "a shard of three, a buffer": lambda spec: spec.but(shard=1, shards=3, reader=RANDOM),
    "whole batches, reset by hand, nothing prepared": lambda spec: spec.but(
        paths=spec.paths[:8], iterator={"auto_reset": False, "prepare_first_batch": False}
    ),
}


@pytest.mark.parametrize("kind", EXACT)
def test_every_state_resumes_exactly(spec: Spec, kind: str) -> None:
    made = EXACT[kind](spec)
    tried = check_resumable(lambda: iterator_of(made), epochs=3)
    assert tried == 3 * len(NativeDALILoader(made)) + 1


@pytest.mark.parametrize("settings", [{"prefetch_queue_depth": 4}, {"exec_dynamic": False}])
def test_how_a_pipeline_is_run_may_change(spec: Spec, settings: dict[str, Any]) -> None:
    check_resumable(
        lambda: iterator_of(spec), make_resumed=lambda: iterator_of(spec.but(settings=settings))
    )


def classification(spec: Spec, folder: Path) -> Any:
    return lambda checkpoint: DALIClassificationIterator(
        spec.build(checkpoint), reader_name="Reader", last_batch_policy=LastBatchPolicy.PARTIAL
    )


def lists(spec: Spec, folder: Path) -> Any:
    tags = [DALIRaggedIterator.SPARSE_LIST_TAG, DALIRaggedIterator.DENSE_TAG]
    return lambda checkpoint: iterator_over(
        spec.build(checkpoint), DALIRaggedIterator, output_types=tags
    )


def a_source_told_the_index(spec: Spec, folder: Path) -> Any:
    source = lambda index: np.full((4, 1), 100 * index)  # noqa: E731
    return spec.but(pipeline=with_source, settings={"source": source})


@pytest.mark.parametrize("factory", [classification, lists, a_source_told_the_index])
def test_pipelines_and_iterators_of_every_kind_resume_exactly(
    factory: Any, spec: Spec, tmp_path: Path
) -> None:
    make = factory(spec, tmp_path)
    check_resumable(lambda: iterator_of(make))
    assert NativeDALILoader(make).identity.fingerprint.startswith("readers__File:Files:10:")


def test_ranks_killed_at_every_step_serve_every_sample_once(paths: list[str]) -> None:
    world = 3
    specs = [Spec(paths, shard=one, shards=world, reader=RANDOM) for one in range(world)]
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


def test_one_iterator_serves_all_epochs_and_a_restore_builds_one_more(spec: Spec) -> None:
    make = Counting(spec)
    iterator = iterator_of(make)
    walk(iterator, epochs=2)
    assert make.restored == [False]
    report = iterator.last_report
    assert report is not None
    assert (report.served, report.not_served, report.exact) == (10, 0, None)
    again = Counting(spec)
    iterator = iterator_of(again)
    iterator.load_state_dict(position_after(spec, 1).to_dict())
    assert [(len(iterator), iterator.batch) for _ in iterator] == [(3, 1), (3, 2)]
    assert iterator.last_ids is None
    assert again.restored == [False, True]


def test_a_look_at_a_batch_is_taken_back(spec: Spec) -> None:
    make = Counting(spec.but(settings={"seed": None}))
    iterator = CFIterator(NativeDALILoader(make), cf_manager=FakeManager())
    look = digest(next(iter(iterator)))
    assert digest(next(iter(iterator))) == look
    assert make.restored == [False, True]


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


@pytest.mark.parametrize(
    ("broken", "settings", "auto_reset"),
    [(0, {}, True), (13, {"exec_dynamic": False}, False), (25, {}, False)],
)
def test_a_caught_exception_loses_and_repeats_nothing(
    tmp_path: Path, broken: int, settings: dict[str, Any], auto_reset: bool
) -> None:
    """The file is repaired, and the loop entered again."""
    reader = {"shuffle_after_epoch": True, "dont_use_mmap": True}
    files, options = write_images(tmp_path, 26), {"auto_reset": auto_reset}
    spec = Spec(files, reader=reader, settings=settings, iterator=options)
    whole = walk(iterator_of(spec), epochs=1)
    iterator = iterator_of(spec.but(iterator={**options, "prepare_first_batch": False}))
    content = Path(files[broken]).read_bytes()
    put(files[broken], b"no picture")
    served: list[str] = []
    with pytest.raises(RuntimeError, match="Critical error"):
        served.extend(map(digest, iterator))
    put(files[broken], content)
    served.extend(map(digest, iterator))
    assert served == [one.digest for one in whole]


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
            image = batch[0]["data"]
            assert image.shape == (len(weights), 6, 6, 3)
            served += counted(iterator, batch)
        sizes.append((labels_of(batch), weights.tolist()))
        if weights.tolist() == [0.0]:
            assert image.untyped_storage().nbytes() == image.nbytes, "it is memory of DALI's"
    assert sizes == [([5], [0.0]), ([12], [1.0]), ([18], [0.0]), ([25], [1.0])]
    assert sorted(served) == list(range(26))


# What is refused at once


@pipeline_def
def two_readers(reader: dict[str, Any]) -> Any:
    return (fn.readers.file(name="Reader", **reader)[1], fn.readers.file(name="Other", **reader)[1])


@pytest.mark.filterwarnings("ignore:Checkpointing enabled in a pipeline with external source")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"iterator": {"last_batch_policy": LastBatchPolicy.FILL}}, "last_batch_policy is FILL"),
        ({"reader": {"pad_last_batch": False}}, "give it pad_last_batch=True"),
        ({"settings": {"enable_checkpointing": False}}, "enable_checkpointing=True"),
        ({"pipeline": two_readers}, "found 2 \\(Other, Reader\\)"),
        ({"iterator": {"reader_name": None}}, "give it reader_name='Reader'"),
        (
            {"pipeline": with_source, "settings": {"source": lambda: np.zeros((4, 1), np.int64)}},
            "takes its data from callable",
        ),
        (
            {"pipeline": with_source, "iterator": {"prepare_first_batch": False}},
            "takes its data from feed_input",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(spec: Spec, changes: Any, reason: str) -> None:
    with pytest.raises(NotResumableError, match=reason):
        NativeDALILoader(spec.but(**changes))


def several_pipelines(spec: Spec) -> Any:
    pipelines = [spec.but(shard=one, shards=2).build(None) for one in range(2)]
    return lambda _: DALIGenericIterator(pipelines, ["data", "label"], reader_name="Reader")


def with_an_earlier_checkpoint(spec: Spec) -> Any:
    built = spec(None)
    next(built)
    other = built.checkpoints()[0]
    return lambda checkpoint: spec(checkpoint and other)


#: What builds no fresh iterator, what does not restore the checkpoint, and what is said of it.
FACTORIES: dict[str, tuple[Callable[[Spec], Any], str]] = {
    "several pipelines": (several_pipelines, "runs 2 pipelines"),
    "a built iterator": (lambda spec: spec(None), re.escape(BUILT_ITERATOR)),
    "no iterator": (lambda spec: lambda _: [], "got list"),
    "a pipeline run before": (
        lambda spec: lambda _: iterator_over(spec(None)._pipes[0]),
        "has served 1 batches, not 0",
    ),
    "ignores it": (lambda spec: lambda _: spec(None), "starts from the beginning"),
    "takes another": (with_an_earlier_checkpoint, "has served 1 batches, not 2"),
    "builds another iterator": (
        lambda spec: lambda one: spec(one) if one is None else spec.but(batch=2)(one),
        "the same iterator each time",
    ),
}


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_factory_that_does_not_build_what_it_should_is_refused(spec: Spec, kind: str) -> None:
    factory, reason = FACTORIES[kind]
    saved = position_after(spec, 2).to_dict()
    with pytest.raises(NotResumableError, match=reason):
        iterator = iterator_of(factory(spec))
        iterator.load_state_dict(saved)
        next(iter(iterator))


# What is refused on a restore


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"shard": 1}, "shard"),
        ({"shards": 3}, "shards"),
        ({"batch": 5}, "batch"),
        ({"pipeline": plain}, "operators"),
        ({"reader": {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": 3}}, "settings"),
        ({"paths": []}, "fingerprint"),
        ({}, "world"),
    ],
)
def test_a_different_layout_or_pipeline_or_other_files_are_refused(
    paths: list[str], spec: Spec, changes: dict[str, Any], field: str
) -> None:
    if "paths" in changes:
        changes = {"paths": paths[1:11]}
    saved = position_after(spec.but(shards=2), 1)
    ranks = {"rank": 0, "world": 2} if field == "world" else {}
    live = iterator_of(spec.but(**{"shards": 2, **changes}), **ranks)
    with pytest.raises(ResumeMismatchError) as caught:
        live.load_state_dict(saved.to_dict())
    assert caught.value.field == field
    assert live.state_dict()["position"] == 0


def test_the_fingerprint_follows_the_files_and_not_their_root(tmp_path: Path) -> None:
    def name(**reader: Any) -> str:
        spec = Spec([], reader={"files": None, "labels": None, **reader})
        return NativeDALILoader(spec).identity.fingerprint

    paths, others = (write_images(tmp_path / one, 6) for one in ("one", "two"))
    assert name(files=paths) == name(files=others)
    roots = [str(tmp_path / one) for one in ("one", "two")]
    (tmp_path / "one" / "class0" / "notes.txt").write_text("not an image")
    assert name(file_root=roots[0]) == name(file_root=roots[1])
    os.rename(paths[0], tmp_path / "one" / "class0" / "other.jpg")
    assert name(file_root=roots[0]) != name(file_root=roots[1])

    (tmp_path / "a.txt").write_text("class1/001.jpg 1\n")
    (tmp_path / "b.txt").write_text("class1/001.jpg 2\n")
    listed = [name(file_root=roots[1], file_list=str(tmp_path / one)) for one in ("a.txt", "b.txt")]
    assert listed[0] != listed[1]


def test_no_part_of_a_state_can_be_missing_and_a_newer_one_asks_for_an_upgrade(spec: Spec) -> None:
    loader, saved = NativeDALILoader(spec), position_after(spec, 2)
    state = saved.states[0]
    damaged = [{key: state[key] for key in state if key != name} for name in state]
    damaged += [{**state, "checkpoint": state["checkpoint"][:end]} for end in (0, 1, -4, -1)]
    for one in [*damaged, None, [], {}, {**state, "more": 1}]:
        with pytest.raises(CorruptPositionError):
            loader.accept(replace(saved, states=(one,)))
    for changes, reason in [
        ({"states": ({**state, "version": 2},)}, "upgrade"),
        ({"states": ()}, "lacks the states"),
        ({"position": 4}, "at sample 4 of epoch 0, but DALI's state in it is"),
    ]:
        with pytest.raises(CorruptPositionError, match=reason):
            loader.accept(replace(saved, **changes))
